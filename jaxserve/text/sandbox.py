# ruff: noqa: ANN401  (a template's values are of any type)
"""A jinja2 environment in which a template can spend only a bounded amount of work and text.

jinja2's sandbox stops a template from reaching Python; it does not stop three nested loops over
`range(100000)`, or a string doubled thirty times. Here each loop round, call, filter, slice and
comparison takes steps from a `Budget`, and all text that is made takes characters.
"""

import datetime
import functools
import json
from collections.abc import Callable, Sized
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from jaxserve.text.budget import (
    CALL_STEPS,
    FILTER_STEPS,
    ITEMS_PER_STEP,
    LOOKUP_STEPS,
    Budget,
    as_sized,
    check_bits,
    check_format,
    check_product,
    check_string_method,
    check_width,
)

# A key no template can write, since it is not an identifier.
BUDGET_KEY = "the budget"
# Literal text up to this length is paid for by the loop round it stands in.
FREE_LITERAL_CHARS = 32
_DROPPED_FILTERS = ("urlize", "striptags", "wordwrap", "xmlattr", "random", "pprint")
_DEEP_FILTERS = frozenset({"tojson", "string", "join", "format", "escape", "e", "forceescape"})
_FREE_FILTERS = frozenset({"length", "count", "first", "last", "default", "d", "safe", "attr"})


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with Hugging Face's conventions and a budget in every rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would compute outside of any budget
            finalize=_finalize,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters = {name: _bound_filter(name, f) for name, f in self.filters.items()}
        self.filters |= {" tick": _tick, " literal": _literal, " walk": _walk, " concat": _concat}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        _Instrument().visit(template)
        return template

    # The odd parameter names are jinja2's: a template may pass any keyword.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = _budget(__context)
        budget.spend(CALL_STEPS)
        receiver = getattr(__obj, "__self__", None)
        if isinstance(receiver, str):
            args = tuple(as_sized(value) for value in args)
            check_string_method(budget, receiver, __obj.__name__, [*args, *kwargs.values()])
        if isinstance(receiver, int):  # to_bytes makes as many as it is told
            for value in (*args, *kwargs.values()):
                check_width(__obj.__name__, value)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.spend_on_size(result)
        return result

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        budget.spend(1)
        match operator:
            case "+" if isinstance(left, Sized) and isinstance(right, Sized):
                budget.spend_on_size(left)
                budget.spend_on_size(right)
            case "*":
                check_product(budget, left, right)
            case "**" if isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() * abs(right))
            case "%" if isinstance(left, str):
                check_format(left)
                budget.spend_on(right)
        return super().call_binop(context, operator, left, right)


def _budget(context: Any) -> Budget:
    budget = context.parent[BUDGET_KEY]
    assert isinstance(budget, Budget)
    return budget


class _Instrument(jinja2.visitor.NodeTransformer):
    """Puts the budget's filters where compiled code would not pass through the environment."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802
        steps = _count_steps(node)
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_tick_of(steps, node)))
        if node.test is not None:
            node.test = jinja2.nodes.And(_tick_of(steps, node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Macro:  # noqa: N802
        steps = _count_steps(node)
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_tick_of(steps, node)))
        return node

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData) -> jinja2.nodes.Expr:  # noqa: N802
        if len(node.data) <= FREE_LITERAL_CHARS:
            return node
        return _call(" literal", jinja2.nodes.Const(node.data), node)

    def visit_Operand(self, node: jinja2.nodes.Operand) -> jinja2.nodes.Operand:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.expr, jinja2.nodes.Const):
            node.expr = _call(" walk", node.expr, node)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            node.node = _call(" walk", node.node, node)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _call(" concat", jinja2.nodes.List(node.nodes, lineno=node.lineno), node)


def _count_steps(node: jinja2.nodes.Node) -> int:
    """Returns what a round of this loop costs: lookups are slow and pass no budget."""
    lookups = (jinja2.nodes.Getattr, jinja2.nodes.Getitem)
    return 1 + LOOKUP_STEPS * sum(1 for _ in node.find_all(lookups))


def _tick_of(steps: int, at: jinja2.nodes.Node) -> jinja2.nodes.Filter:
    return _call(" tick", jinja2.nodes.Const(steps), at)


def _call(name: str, value: jinja2.nodes.Expr, at: jinja2.nodes.Node) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(value, name, [], [], None, None, lineno=at.lineno)


@jinja2.pass_context
def _tick(context: Any, steps: int) -> bool:
    _budget(context).spend(steps)
    return True


@jinja2.pass_context
def _literal(context: Any, value: str) -> str:
    _budget(context).spend(0, len(value))
    return value


@jinja2.pass_context
def _walk(context: Any, value: Any) -> Any:
    if isinstance(value, str):  # searching or copying it is fast, but not free
        _budget(context).spend(0, len(value) // ITEMS_PER_STEP)
    elif isinstance(value, Sized):
        _budget(context).spend_on_size(value)
    return value


@jinja2.pass_context
def _concat(context: Any, values: list[Any]) -> str:
    _budget(context).spend_on(values)
    return "".join(map(str, values))


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> Any:
    _budget(context).spend_on(value)
    return value


def _bound_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the filter with its work paid for before it runs, and its text after."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    @functools.wraps(function)
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.spend(FILTER_STEPS)
        given = [*args, *kwargs.values()]
        if name in _DEEP_FILTERS:
            value = as_sized(value)
            budget.spend_on([value, given])
        elif name not in _FREE_FILTERS:
            budget.spend_on_size(value)
            for number in given:
                check_width(name, number)
        if name == "format":
            check_format(str(value))
        if name in ("replace", "join", "indent") and isinstance(value, Sized):
            longest = max((len(text) for text in given if isinstance(text, str)), default=0)
            pieces = len(value)
            if name == "replace" and isinstance(value, str) and args:
                pieces = value.count(str(args[0]))
            budget.spend(0, longest * pieces)
        extra = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }.get(wants or "", ())
        result = function(*extra, value, *args, **kwargs)
        if isinstance(result, str):
            budget.spend(0, len(result))
        return result

    return bounded


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    check_format(pattern)
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: without HTML escaping."""
    if indent is not None:
        check_width("tojson", indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with "_": they would reach Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: `namespace(self=1)` is legal
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute_name(name)
        super().__setitem__(name, value)


def _check_attribute_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace cannot hold {name!r}; rename it")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote; for serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)
