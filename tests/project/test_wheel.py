"""What is shipped."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_the_inspector_the_trained_model_and_every_module(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    shipped = set(ZipFile(wheel).namelist())
    source = ROOT / "src"
    kinds = ("py", "js", "css", "html", "safetensors", "json", "md")
    here = {str(path.relative_to(source)) for kind in kinds for path in source.rglob(f"*.{kind}")}
    assert "titanmem/serve/static/index.html" in here
    assert any(name.endswith("model.safetensors") for name in here)
    assert here <= shipped
