"""Checks of the form that an output is to have; what is in a grammar, `text.constraints` reads."""

from typing import Final

from jaxserve.engine.fields import refusal
from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.request import SamplingParams, StructuredOutput
from jaxserve.text.grammar_source import FIELDS

KINDS_WITH_TEXT: Final = frozenset({"json_schema", "regex", "lark"})


def check_structured(asked: StructuredOutput, sampling: SamplingParams) -> None:
    """Refuses a form that is none, or that `sampling` contradicts.

    Raises:
      InvalidRequestError: names the field.
      UnsupportedError: a parameter would keep the output from ending where its form is complete.
    """
    if not isinstance(asked, StructuredOutput):
        raise refusal(asked, "structured_output", "a StructuredOutput; leave it out for free text")
    if asked.kind not in FIELDS:
        raise refusal(asked.kind, "structured_output", f"of the kind {', '.join(FIELDS)}")
    for name, is_set in (
        ("ignore_eos", sampling.ignore_eos),
        ("min_tokens", sampling.min_tokens > 0),
    ):
        if is_set:
            raise UnsupportedError(
                f"{name} does not go with structured_output, which ends where its form is "
                "complete; leave one of them out",
                field=f"stop.{name}",
            )
    field = asked.field or FIELDS[asked.kind]
    if not isinstance(asked.text, str):
        raise refusal(asked.text, field, "text")
    if bool(asked.text) is not (asked.kind in KINDS_WITH_TEXT):
        what = "be a text that says what is allowed" if not asked.text else "have no text"
        raise InvalidRequestError(
            f"{field.rpartition('.')[2]} must {what}; repair it or leave it out", field=field
        )
    _check_choices(asked, field)


def _check_choices(asked: StructuredOutput, field: str) -> None:
    choices = asked.choices
    if not isinstance(choices, tuple | list) or not all(isinstance(c, str) for c in choices):
        raise refusal(choices, field, "a list of texts")
    if choices and asked.kind != "choice":
        raise refusal(choices, field, f"without choices, as {asked.kind} has none")
    if not all(choices):
        raise InvalidRequestError(
            "choice holds an empty text, but each must have something; leave it out", field=field
        )
