"""A memory plan in words and as a value."""

import pytest

from easy_context.memory.plan import KEEP_EVERYTHING, LayerPlan, format_memory_plan, parse_memory_plan

ATTENTION = LayerPlan()
ON_HOST = LayerPlan(input="cpu", attention="cpu", projections="cpu")
NOTHING = LayerPlan(input="none", attention="none")


@pytest.mark.parametrize(
    "text,plan",
    [
        ("all", (KEEP_EVERYTHING,) * 4),
        ("input+attention", (ATTENTION,) * 4),
        ("input@cpu+attention@cpu+projections@cpu", (ON_HOST,) * 4),
        ("input@gpu", (LayerPlan(attention="none"),) * 4),
        ("input+attention,nothing", (ATTENTION, NOTHING) * 2),
        ("input+attention, attention, nothing", (ATTENTION, LayerPlan(input="none"), NOTHING, ATTENTION)),
        ("1*(input+attention,nothing),2*all", (ATTENTION, NOTHING) + (KEEP_EVERYTHING,) * 2),
        ("1*input+attention,3 * all", (ATTENTION,) + (KEEP_EVERYTHING,) * 3),
    ],
)
def test_texts_and_plans(text, plan):
    assert parse_memory_plan(text, 4) == plan
    assert parse_memory_plan(format_memory_plan(plan), 4) == plan


def test_the_text_of_a_plan_is_short():
    assert format_memory_plan((ATTENTION,) * 32) == "input+attention"
    assert format_memory_plan((ATTENTION, NOTHING) * 16) == "input+attention,nothing"
    assert format_memory_plan((ATTENTION,) * 30 + (KEEP_EVERYTHING,) * 2) == "30*input+attention,2*all"
    assert (
        format_memory_plan((ATTENTION, NOTHING) * 15 + (KEEP_EVERYTHING,) * 2) == "15*(input+attention,nothing),2*all"
    )
    assert format_memory_plan((ATTENTION, NOTHING)) == "1*input+attention,1*nothing"
    assert format_memory_plan((ON_HOST,)) == "input@cpu+attention@cpu+projections@cpu"


@pytest.mark.parametrize(
    "text,words",
    [
        ("everything", "memory_plan 'everything': 'everything' is not one of input"),
        ("input+input", "input is given twice"),
        ("input@disk", "'disk' in 'input@disk' is neither cpu nor gpu"),
        ("input@", "'' in 'input@' is neither"),
        ("input+all", "all cannot be combined"),
        ("attention + input", "'attention '"),
        ("", "memory_plan '': an entry is empty"),
        ("0*all", "the count '0' is not a whole number"),
        ("2*(all", "parentheses of '2\\*\\(all' do not match"),
        ("2*all,input", "some entries a count and others none"),
        ("2*all,1*input", "for 3 layers, but the model has 4"),
        ("nothing", "layer 1 does not keep its input"),
        ("1*all,3*attention", "layer 2 does not keep its input"),
    ],
)
def test_what_is_no_plan_is_refused(text, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        parse_memory_plan(text, 4)


def test_an_unknown_place_is_refused():
    with pytest.raises(ValueError, match="(?s)projections 'disk'.*gpu, cpu, none"):
        LayerPlan(projections="disk")
