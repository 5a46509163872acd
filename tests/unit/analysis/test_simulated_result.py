"""Results: which way is chosen, and in which words, where ways do not fit or cut documents."""

from dataclasses import replace

from distca_hf.analysis.simulate.result import Result, WayFigures


PLAIN = WayFigures("plain", "plain packing", False, False, 1.0, 1.0, 0.4, 1, True, 1.0, 1.0, True, 1, 0.3, 0, 4000)
ULYSSES = replace(PLAIN, key="ulysses", label="Ulysses over 4", step_seconds=2.0, times_as_fast=0.5)
PLACED = replace(PLAIN, key="placed", label="distca, placed", is_ours=True, step_seconds=1.5)
KEPT = replace(PLACED, key="given", label="distca, your packs", step_seconds=0.8)


def result(*ways: WayFigures) -> Result:
    return Result(4, 1, 8, None, 32, 32.0, 1, 1, list(ways), [])


def cut(way: WayFigures) -> WayFigures:
    return replace(way, whole=False)


def too_large(way: WayFigures) -> WayFigures:
    return replace(way, fits=False)


def test_the_fastest_is_chosen_where_all_keep_documents_whole() -> None:
    chosen = result(PLAIN, ULYSSES, PLACED, KEPT)

    assert (chosen.ours, chosen.other, chosen.gain) == (KEPT, PLAIN, 1.25)
    assert chosen.in_short() == (
        "Choose distca, your packs: 1.25 x as fast as the fastest way without CAD, plain packing."
    )


def test_ways_that_keep_documents_whole_are_compared_with_each_other() -> None:
    chosen = result(cut(PLAIN), ULYSSES, replace(PLACED, times_as_fast=0.67), cut(KEPT))

    assert (chosen.ours, chosen.other, chosen.gain) == (replace(PLACED, times_as_fast=0.67), ULYSSES, 2 / 1.5)
    assert chosen.in_short() == (
        "Choose distca, placed: 1.33 x as fast as the fastest way without CAD, Ulysses over 4, and 0.67 x as fast as "
        "plain packing, which leaves out attention between parts of documents."
    )


def test_a_way_that_cuts_documents_stands_where_distca_is_faster_all_the_same() -> None:
    chosen = result(cut(replace(PLAIN, step_seconds=1.8)), ULYSSES, PLACED)

    assert chosen.gain == 1.8 / 1.5
    assert "plain packing, which leaves out attention between parts of documents." in chosen.in_short()


def test_a_way_that_cuts_documents_is_not_better_than_one_that_does_not() -> None:
    ours, others = result(cut(PLAIN), PLACED), result(PLAIN, too_large(PLACED), cut(KEPT))

    assert ours.in_short() == (
        "Choose distca, placed: without CAD nothing that fits the memory of a GPU attends whole documents. The "
        "fastest is plain packing, which leaves out attention between parts of documents, in 0.67 of the time."
    )
    assert others.in_short() == (
        "Of distca's ways only this fits the memory of a GPU: distca, your packs, which leaves out attention between "
        "parts of documents. Choose plain packing."
    )


def test_where_all_cut_documents_the_fastest_is_chosen_and_said_to() -> None:
    chosen = result(cut(PLAIN), cut(KEPT))

    assert chosen.gain == 1.25
    assert chosen.in_short().endswith("plain packing, which leaves out attention between parts of documents.")
