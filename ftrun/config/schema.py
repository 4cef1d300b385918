"""The JSON schema of the job file, for editors and for ``configs/ftrun.schema.json``."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ftrun.config.job import JobConfig
from ftrun.config.units import duration_text, interval_text
from ftrun.contract import Every


class _AsWritten(GenerateJsonSchema):
    """Defaults in the form in which a job file holds them, and no titles: they only repeat the keys."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, timedelta):
            return duration_text(dft)
        if isinstance(dft, Every):
            return interval_text(dft)
        return super().encode_default(dft)

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False


def job_schema() -> dict[str, Any]:
    """The schema as a JSON document, dialect 2020-12."""
    schema = JobConfig.model_json_schema(schema_generator=_AsWritten)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "ftrun job"}


def schema_text() -> str:
    """What ``ftrun config schema`` prints and ``configs/ftrun.schema.json`` holds."""
    return json.dumps(job_schema(), indent=2) + "\n"
