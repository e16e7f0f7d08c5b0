"""Requests made from the server's own description."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from server import serving

from titanmem.serve.service import Limits


def test_no_request_that_can_be_described_fails_the_server(tmp_path):
    with serving(tmp_path, limits=Limits(new_tokens=8, choices=2)) as (service, address):
        described = schemathesis.openapi.from_url(f"{address}/openapi.json")
        operations = [found.ok() for found in described.get_all_operations()]
        assert len(operations) > 20
        answers = [status for operation in operations for status in ask(operation, service)]
        assert sum(status < 300 for status in answers) > 100
        assert sum(400 <= status < 500 for status in answers) > 100


def ask(operation, service) -> list[int]:
    """The statuses of some requests; they ask for a session and a model that are there."""
    answers = []

    @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def one(case) -> None:
        if "name" in case.path_parameters:
            case.path_parameters["name"] = "there"
            if not any(info.name == "there" for info in service.store.sessions("")):
                service.store.create("there").close()
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "small"
        answers.append(case.call_and_validate(checks=[not_a_server_error]).status_code)

    one()
    return answers
