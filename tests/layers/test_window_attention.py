"""What the layer itself refuses; what it computes is tested with the blocks."""

import pytest
import torch

from titanmem.layers.window_attention import WindowAttention


@pytest.mark.parametrize(("width", "other"), [(3, 1), (1, 3)])
def test_a_state_of_another_convolution_is_refused(width, other):
    x = torch.randn(2, 5, 16)
    with pytest.raises(ValueError, match="another convolution"):
        WindowAttention(16, 2, 4, conv_width=width)(x, WindowAttention(16, 2, 4, conv_width=other).start(2))


@pytest.mark.parametrize("width", [0, -3])
def test_a_convolution_is_at_least_one_token_wide(width):
    with pytest.raises(ValueError, match=f"conv_width must be at least 1, which is none, got {width}"):
        WindowAttention(16, 2, 4, conv_width=width)
