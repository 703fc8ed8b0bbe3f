"""Shares of pairs that differ: exact intervals, changes at a stated rate of false alarms, within a stated delay."""

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provenance.explain import drift, trend
from provenance.explain.drift import Bucket, Series, changes, delay, exact, missing, tail, total
from provenance.facts import Field

SEEDS = 200
DAYS, PAIRS = 40, 500
# Clopper and Pearson's intervals as SciPy 1.17.1's binomtest gives them.
KNOWN = [
    (0, 20, 0.0, 0.16843347098308548), (20, 20, 0.8315665290169145, 1.0), (7, 50, 0.05819170033997344, 0.26739600249700846),
    (1, 3, 0.008403758659612647, 0.9057006759492866), (100, 1000000, 8.13647085658056e-05, 0.00012162547881720983),
    (3, 1000, 0.0006190999316499173, 0.008742023238657654),
]  # fmt: skip


def binomial(hits: int, among: int, share: Fraction) -> Fraction:
    """Return the tail of the binomial distribution as a fraction."""
    return sum(
        (math.comb(among, k) * share**k * (1 - share) ** (among - k) for k in range(max(hits, 0), among + 1)),
        Fraction(0),
    )


def traffic(seed: int, *shares: float, pairs: int = PAIRS) -> list[Bucket]:
    """Draw a day's counts for each share."""
    draw = random.Random(seed)
    days = []
    for day, share in enumerate(shares):
        hits, place = 0, 0
        while share and (place := place + int(math.log(1 - draw.random()) / math.log1p(-share)) + 1) <= pairs:
            hits += 1
        days.append(Bucket(24 * day, pairs, hits))
    return days


# -- intervals ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 60), st.fractions(0, 1, max_denominator=1000))
def test_the_tail_is_that_of_the_binomial_distribution(hits: int, among: int, share: Fraction) -> None:
    assert tail(hits, among, float(share)) == pytest.approx(float(binomial(hits, among, share)), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize(("hits", "among", "low", "high"), KNOWN)
def test_an_interval_is_as_others_compute_it(hits: int, among: int, low: float, high: float) -> None:
    found = exact(hits, among)
    assert found == pytest.approx((low, high), rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(st.integers(1, 200), st.data())
def test_an_interval_is_the_shares_that_are_not_refuted(among: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, among))
    low, high = exact(hits, among)
    assert low <= hits / among <= high
    if hits:
        assert tail(hits, among, low) == pytest.approx(0.025, rel=1e-6)
    if hits < among:
        assert 1 - tail(hits + 1, among, high) == pytest.approx(0.025, rel=1e-6)


def test_a_share_of_all_or_of_none_is_certain() -> None:
    assert tail(1, 10, 1.0) == 1.0
    assert tail(1, 10, 0.0) == 0.0


# -- changes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 1e-4, 1e-2])
def test_steady_traffic_is_as_seldom_called_changed_as_is_stated(share: float) -> None:
    alarms = sum(bool(changes(traffic(seed, *[share] * DAYS), 0.05)) for seed in range(SEEDS))
    # So many false alarms or more come once in a thousand, if one look in twenty gives one.
    most = next(n for n in range(SEEDS) if tail(n + 1, SEEDS, 0.05) < 0.001)
    assert alarms <= most
    assert sum(bool(changes(traffic(seed, *[share] * DAYS))) for seed in range(SEEDS)) <= 2


@pytest.mark.parametrize(("before", "after"), [(0.0, 1e-2), (1e-4, 1e-2), (1e-2, 5e-2), (0.0, 3e-3)])
def test_a_new_driver_is_found_within_the_stated_delay(before: float, after: float) -> None:
    found, right, late = 0, 0, 0
    for seed in range(SEEDS):
        half = traffic(seed, *[before] * (DAYS // 2))
        needed = delay(total(half), after, DAYS)
        assert needed is not None
        days = -(-needed // PAIRS)  # to the stated pairs comes the rest of the day
        days_after = traffic(seed + 10_000, *[after] * days)
        seen = changes([*half, *days_after], drift.ALARM)
        found += bool(seen)
        right += any(abs(item.place - DAYS // 2) <= max(1, days // 2) for item in seen)
        # and half of that is not enough for all: the delay is no idle figure
        late += bool(changes([*half, *days_after[: days // 3]]))
    assert found >= next(n for n in range(SEEDS) if tail(n, SEEDS, drift.POWER) < 0.999)
    assert right >= 0.9 * found
    assert late < found


def test_a_change_back_is_found_too_and_both_have_their_shares() -> None:
    seen = changes(traffic(3, *[1e-4] * 15, *[5e-2] * 10, *[1e-4] * 15))
    assert [item.place for item in seen] == [15, 25]
    assert seen[0].after == seen[1].before
    assert seen[0].after.pairs == 10 * PAIRS
    assert seen[0].after.differed > 10 * seen[0].before.differed
    assert all(item.log_p <= math.log(drift.ALARM) for item in seen)


def test_days_without_pairs_make_no_tests_and_no_changes() -> None:
    empty = [Bucket(24 * n) for n in range(50)]
    assert changes(empty) == []
    assert changes([]) == []
    days = traffic(1, *[0.0] * 5, *[0.1] * 5)
    spread = [item for day in days for item in (day, *empty[:7])]
    assert [spread[item.place].differed for item in changes(spread)] == [days[5].differed]
    assert changes(spread)[0].log_p == changes(days)[0].log_p


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 50), st.floats(0.001, 0.5))
def test_the_delay_is_enough_and_one_pair_less_is_not(pairs: int, differed: int, to: float) -> None:
    before = Bucket(0, pairs, min(differed, pairs))
    needed = delay(before, to, 30)
    if needed is None:
        return
    limit = math.log(drift.ALARM / 60)

    def power(count: int) -> float:
        hits = next((n for n in range(count + 1) if drift._told(before, n, count, limit)), count + 1)
        return tail(hits, count, to)

    assert power(needed) >= drift.POWER
    assert needed == 1 or power(needed - 1) < drift.POWER


# -- verdicts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "differed", "limit", "verdict", "code"),
    [
        (0, 0, None, "nothing", 3), (0, 0, 0.01, "nothing", 3), (100, 0, None, "measured", 0), (100, 0, 0.01, "unclear", 3),
        (368, 0, 0.01, "under", 0), (1000, 30, 0.01, "over", 1), (1000, 12, 0.01, "unclear", 3), (1000, 2, 0.01, "under", 0),
    ],
)  # fmt: skip
def test_only_the_lower_end_fails_and_only_the_upper_end_passes(
    pairs: int, differed: int, limit: float | None, verdict: str, code: int
) -> None:
    answer = drift.answer(Series("", [Bucket(0, pairs, differed)]), (), limit)
    assert answer["verdict"] == verdict
    assert drift.EXIT[verdict] == code
    assert trend.headline(answer).startswith("Could not tell" if code == 3 else ("Measured", "Holds", "Too much"))
    low, high = exact(differed, pairs)
    assert limit is None or (verdict == "over") == (low > limit)
    assert limit is None or not pairs or (verdict == "under") == (high <= limit)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(0, 2000), st.sampled_from([0.001, 0.01, 0.1]))
def test_with_the_missing_pairs_it_could_be_told(hits: int, among: int, limit: float) -> None:
    hits = min(hits, among)
    more = missing(hits, among, limit)
    if more is None:
        assert abs(hits / among - limit) < 1e-4
        return
    low, high = exact(round((among + more) * hits / among) if among else 0, among + more)
    assert low > limit or high <= limit


def test_where_nothing_was_asked_twice_three_hundred_and_sixty_eight_pairs_are_missing() -> None:
    assert missing(0, 0, 0.01) == 368


def test_what_has_no_text_is_in_the_interval_on_both_sides() -> None:
    known = drift.normalised(Bucket(0, 1000, 10, 6, 0))
    assert (known["differed"], known["share"]) == (4, 0.004)
    assert (known["low"], known["high"]) == exact(4, 1000)
    open_ = drift.normalised(Bucket(0, 1000, 10, 6, 3))
    assert (open_["differed"], open_["share"], open_["differed_least"], open_["differed_most"]) == (None, None, 1, 4)
    assert (open_["low"], open_["high"]) == (exact(1, 1000)[0], exact(4, 1000)[1])
    assert drift.normalised(Bucket())["share"] is None


def test_what_came_with_a_change_are_fields_that_can_decide_and_are_known_on_both_sides() -> None:
    before = [Field("gpu.driver_version", "570"), Field("torch.version", "2.9"), Field.unknown("cudnn.version", "no"),
              Field("gpu.nvml_version", "1"), Field("os.libc", "2.40"), Field.unset("env.OMP_NUM_THREADS", "x")]  # fmt: skip
    after = [Field("gpu.driver_version", "580"), Field("torch.version", "2.10"), Field("cudnn.version", "9"),
             Field("gpu.nvml_version", "2"), Field("os.libc", "2.40"), Field("mine.new", 1)]  # fmt: skip
    found = drift.came({f.name: f for f in before}, {f.name: f for f in after})
    assert [(item["field"], item["before"], item["after"]) for item in found] == [
        ("torch.version", "2.9", "2.10"), ("gpu.driver_version", "570", "580"),
    ]  # fmt: skip


# -- faces --------------------------------------------------------------------------------------------


def answered(limit: float | None = 0.01) -> dict[str, object]:
    days = traffic(3, *[1e-4] * 15, 0.0, *[5e-2] * 20)
    days[15] = Bucket(days[15].start)
    days[20] = days[20]._replace(surface=2, untold=1)
    whole = Series("", days, Bucket(0, 10, 1), Bucket(0, 20, 2))
    answer = drift.answer(whole, [Series("<b>H200</b>\u202e", days), Series("other", days[:3])], limit)
    for item in answer["changes"]:
        item["came"] = [{"field": f"f.{n}", "before": "<1>", "after": "2", "prior": 1} for n in range(8)]
    return answer


def test_a_terminal_gets_a_bar_for_each_stretch_and_the_change_is_marked() -> None:
    answer = answered()
    texts = [text for _, text in trend.lines(answer)]
    rows = [text for text in texts if " pairs " in text and text[:2] == "19"]
    assert 15 <= len(rows) <= trend.ROWS
    assert sum("◂ changed" in text for text in rows) == 1
    assert any("rose at 1970-01-17" in text for text in texts)
    assert any("and 2 more fields" in text for text in texts)
    assert any(text == "<b>H200</b>\u202e" for text in texts)  # made visible where it is printed
    assert any("False alarms: at most 0.001" in text for text in texts)
    assert any("in one environment: 1 of 10" in text for text in texts)
    assert any("pairs without their texts" in text for text in texts)


def test_a_page_loads_nothing_and_escapes_what_is_of_others() -> None:
    made = trend.page(answered())
    assert "Content-Security-Policy" in made
    assert "default-src 'none'" in made
    assert "<script" not in made
    assert "<b>H200" not in made
    assert "\u202e" not in made
    assert "&lt;b&gt;H200&lt;/b&gt;\\u202e" in made
    assert made.count("<circle") == 35
    assert 'class="cut"' in made
    assert 'class="line b"' in made
    assert 'class="line b"' not in trend.page(answered(None))


def test_a_time_beyond_all_calendars_is_its_hour() -> None:
    assert trend.moment(10**12, "day") == f"hour {10**12}"


def test_an_answer_of_nothing_is_a_sentence_and_a_page() -> None:
    answer = drift.answer(Series("", ()), (), 0.01)
    assert [text for _, text in trend.lines(answer)] == [
        "Could not tell: no input was asked twice under equal settings, weights and random state."
    ]
    assert "There is no pair to draw." in trend.page(answer)
    assert "No change found." in trend.page(answer)


def test_steady_traffic_has_no_change_to_tell_and_says_what_is_missing() -> None:
    answer = drift.answer(Series("", [Bucket(0, 30, 0)], Bucket(0, 30), Bucket()), (), 0.01, 1)
    texts = [text for _, text in trend.lines(answer)]
    assert any(text.startswith("Missing: about 338 more pairs") for text in texts)
    assert "No change found." in texts
    assert any("is seen after" in text for text in texts)
    whole = drift.answer(Series("", [Bucket(0, 1, 0)], Bucket(0, 1), Bucket()), (), 1e-9, 1)
    assert any("too few pairs to see a rise" in text for _, text in trend.lines(whole)) == (
        whole["alarm"]["delay_pairs"] is None
    )


def test_a_change_down_and_one_without_a_printable_chance_are_told() -> None:
    days = [Bucket(24 * n, 100_000, 50_000 if n < 5 else 0) for n in range(10)]
    texts = [text for _, text in trend.lines(drift.answer(Series("", days), [Series("x", days)], None))]
    assert any(text.startswith("The share fell at 1970-01-06 (p 1e-") for text in texts)
    assert any("fell at 1970-01-06" in text for text in texts if text.startswith("   "))
