"""A fitted curve as facts for a terminal and as a record for a figure."""

from __future__ import annotations

from typing import Any

from paceline.forecast.scaling import CARRIES, HeldOut, Prediction, ScalingFit

__all__ = ["describe_scaling", "scaling_to_json"]

_FORMAT = "paceline-scaling/1"


def describe_scaling(fit: ScalingFit, target: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, [(label, value)]): the curve, its predictions, and how far they carry."""
    points = fit.points
    xs = sorted(point.x for point in points.points)
    about = [
        (
            "points",
            f"{len(xs)} of {points.family} on {points.target}, K ="
            f" {points.num_speculative_tokens}, {xs[0]:,.0f} to {xs[-1]:,.0f} {points.axis}",
        ),
        ("curve", _formula(fit)),
        ("towards", f"{fit.limit:.2f} ({fit.limit_low:.2f} to {fit.limit_high:.2f})"),
        ("on its points", f"off by at most {fit.worst_residual:.3f}"),
    ]
    found = []
    for one in fit.predictions:
        text = f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})"
        if not one.carries:
            text += "; BEYOND what these points carry: a guess, whatever the interval says"
        found.append((f"{one.x:,.0f}", text))
    honest = [
        f"the curve is seen from {xs[0]:,.0f} to {xs[-1]:,.0f} {points.axis}; up to"
        f" {CARRIES:g} times the end it may carry, beyond that it is a guess",
    ]
    if points.target != target:
        honest.append(
            f"measured on {points.target}, asked for {target}: the form of the curve may carry"
            " over, its height does not"
        )
    if fit.limit_open:
        honest.append("these points do not decide the limit: it is what K allows")
    if fit.at_edge:
        honest.append("these points do not decide the exponent: more places are needed")
    held = [_describe_held_out(one) for one in fit.held_out]
    return [
        ("Acceptance by scaling", about),
        (
            "The largest run, foreseen from smaller ones",
            held or [("-", "not tried: fewer than four points lie below it")],
        ),
        (f"Acceptance length at {points.axis}", found or [("-", "no place is asked for")]),
        ("How far it carries", [("-", text) for text in honest]),
    ]


def _formula(fit: ScalingFit) -> str:
    axis = fit.points.axis
    if fit.form == "power":
        return f"{fit.limit:.3f} - {fit.scale:.4g} x {axis}^-{fit.power:.3f}"
    return f"1 + {fit.limit - 1:.3f} / (1 + ({fit.scale:,.4g} / {axis})^{fit.power:.3f})"


def _describe_held_out(one: HeldOut) -> tuple[str, str]:
    word = "inside" if one.is_covered else "OUTSIDE: do not trust the intervals below"
    return (
        "without the last" + (f" {one.num_left_out}" if one.num_left_out > 1 else ""),
        f"{one.foreseen:.2f} ({one.low:.2f} to {one.high:.2f}); {one.measured:.2f} measured,"
        f" {word}",
    )


def scaling_to_json(fit: ScalingFit) -> dict[str, Any]:
    """Points, curve, hold-outs and predictions (format paceline-scaling/1)."""
    points = fit.points
    return {
        "format": _FORMAT,
        "axis": points.axis,
        "target": points.target,
        "family": points.family,
        "num_speculative_tokens": points.num_speculative_tokens,
        "points": [
            {"x": p.x, "acceptance_length": p.acceptance_length, "low": p.low, "high": p.high}
            for p in sorted(points.points, key=lambda point: point.x)
        ],
        "curve": {
            "limit": fit.limit,
            "limit_low": fit.limit_low,
            "limit_high": fit.limit_high,
            "form": fit.form,
            "scale": fit.scale,
            "power": fit.power,
            "limit_open": fit.limit_open,
            "at_edge": fit.at_edge,
            "worst_residual": fit.worst_residual,
        },
        "held_out": [
            {
                "x": one.x,
                "num_left_out": one.num_left_out,
                "foreseen": one.foreseen,
                "low": one.low,
                "high": one.high,
                "measured": one.measured,
                "is_covered": one.is_covered,
            }
            for one in fit.held_out
        ],
        "predictions": [_prediction(one) for one in fit.predictions],
        "band": [_prediction(one) for one in fit.band],
    }


def _prediction(one: Prediction) -> dict[str, Any]:
    return {
        "x": one.x,
        "acceptance_length": one.value,
        "low": one.low,
        "high": one.high,
        "carries": one.carries,
    }
