"""Placeholder."""

from gradclip import engine


def describe_nonfinite(found):
    parts = []
    for place, sums in enumerate(engine.sums_each(found, float("inf"))):
        nan, pos, neg = sums.to_list()[136:139]
        if nan or pos or neg:
            parts.append(f"gradient of {found.name(place)} holds {nan} NaN, {pos + neg} infinite")
    return ", ".join(parts)
