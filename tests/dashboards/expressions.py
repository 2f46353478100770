"""Which labels the answer to a PromQL expression has; what names a series or a label that is not there is refused.

As far as the dashboards go: what they do not use is refused too.
"""

from collections.abc import Mapping

import promql_parser
from promql_parser import (
    AggModifierType,
    AggregateExpr,
    BinaryExpr,
    BinModifier,
    Call,
    Expr,
    LabelModifierType,
    MatrixSelector,
    NumberLiteral,
    ParenExpr,
    StringLiteral,
    VectorMatchCardinality,
    VectorSelector,
)

Labels = frozenset[str]
Series = Mapping[str, Labels]


class UnknownNameError(Exception):
    """A series or label that nothing exports, or labels that never match."""


def labels_of(expression: str, series: Series) -> Labels:
    """`series`: labels by name. Raises UnknownNameError, and ValueError for what is no PromQL."""
    found = _labels(promql_parser.parse(expression), series)
    return frozenset() if found is None else found


def _labels(expr: Expr, series: Series) -> Labels | None:
    """None: a number, which goes with everything, or a text."""
    match expr:
        case VectorSelector():
            return _of_selector(expr, series)
        case MatrixSelector():
            return _of_selector(expr.vector_selector, series)
        case ParenExpr():
            return _labels(expr.expr, series)
        case NumberLiteral() | StringLiteral():
            return None
        case Call():
            return _of_call(expr, series)
        case AggregateExpr():
            return _of_aggregate(expr, series)
        case BinaryExpr():
            return _of_binary(expr, series)
        case _:
            raise UnknownNameError(f"the dashboards' tests do not know {type(expr).__name__}: teach {__name__} it")


def _of_selector(selector: VectorSelector, series: Series) -> Labels:
    if selector.name is None or selector.name not in series:
        raise UnknownNameError(f"no program has the series {selector.name}")
    labels = series[selector.name]
    _require({matcher.name for matcher in selector.matchers.matchers}, labels, f"a matcher of {selector.name}")
    return labels


def _of_call(call: Call, series: Series) -> Labels:
    [labels] = [found for argument in call.args if (found := _labels(argument, series)) is not None]
    if call.func.name == "histogram_quantile":
        _require({"le"}, labels, "histogram_quantile")
        return labels - {"le"}
    if call.func.name == "label_replace":
        _, target, _, source, _ = call.args
        _require({source.val}, labels, "label_replace")
        return labels | {target.val}
    return labels


def _of_aggregate(expr: AggregateExpr, series: Series) -> Labels:
    within = _labels(expr.expr, series)
    assert within is not None, "an aggregate is of a vector"
    if expr.modifier is None:
        return frozenset()
    by = frozenset(expr.modifier.labels)
    _require(by, within, "an aggregate")
    return by if expr.modifier.type == AggModifierType.By else within - by


def _of_binary(expr: BinaryExpr, series: Series) -> Labels | None:
    left, right = _labels(expr.lhs, series), _labels(expr.rhs, series)
    if left is None or right is None:
        return right if left is None else left
    modifier = expr.modifier
    if modifier is None or modifier.matching is None:
        if left != right:
            raise UnknownNameError(f"the sides have {sorted(left)} and {sorted(right)}: nothing ever matches")
        return left
    return _of_matching(modifier, left, right)


def _of_matching(modifier: BinModifier, left: Labels, right: Labels) -> Labels:
    assert modifier.matching is not None
    on = frozenset(modifier.matching.labels)
    if modifier.matching.type != LabelModifierType.Include:
        raise UnknownNameError(f"the dashboards' tests do not know `ignoring`: teach {__name__} it")
    _require(on, left & right, "on (...)")
    return left if modifier.card == VectorMatchCardinality.ManyToOne else on


def _require(asked: set[str] | Labels, there: Labels, where: str) -> None:
    if missing := asked - there:
        raise UnknownNameError(f"{where} names {sorted(missing)}; there are {sorted(there)}")
