"""Where a node stands, who is left out, and who never is: tables and properties, without any file."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.config.health import Nodes
from ftrun.health import history, policy
from ftrun.health.history import Admitted, Book, By, Excluded, Host, Marked, Withheld
from ftrun.health.marks import Mark, Sign
from ftrun.health.policy import Crowd
from ftrun.health.standing import Rules, State, lasts, standing
from ftrun.launch.remembering import rules

HOUR, DAY = 3600.0, 86400.0
NOW = 1_000_000.0
RULES = rules(Nodes.model_validate({"window": "1d", "first": "1h", "probation": "1d"}))
FOUR = Crowd(frozenset("abcd"), 2)


def mark(sign: Sign, attempt: int = 1, ago: float = 0.0, fingerprint: str = "") -> Marked:
    return Marked(NOW - ago, sign, f"{sign} in {attempt}", attempt, 3, fingerprint)


def out(ago: float, seconds: float | None = HOUR, by: By = By.POLICY, sign: Sign | None = Sign.DEVICE) -> Excluded:
    return Excluded(NOW - ago, by, "because", seconds, sign)


def back(ago: float, by: By) -> Admitted:
    return Admitted(NOW - ago, by, "")


def book(**hosts: tuple[object, ...]) -> Book:
    return Book({name: Host(NOW, NOW, entries) for name, entries in hosts.items()})


def four(**hosts: tuple[object, ...]) -> Book:
    return book(**dict.fromkeys("abcd", ()) | hosts)


TWO = (mark(Sign.LOST, 1), mark(Sign.LOST, 2))

# name: (entries, state, seconds left, how often before)
STANDINGS = {
    "nothing is known": ((), State.FINE, None, 0),
    "a mark": ((mark(Sign.LOST),), State.SUSPECT, None, 0),
    "an old mark": ((mark(Sign.LOST, ago=DAY),), State.FINE, None, 0),
    "a mark by a clock that is ahead": ((mark(Sign.LOST, ago=-HOUR),), State.SUSPECT, None, 0),
    "excluded": ((mark(Sign.DEVICE, ago=600), out(600)), State.EXCLUDED, 3000.0, 1),
    "excluded by a clock that is ahead": ((out(-DAY),), State.EXCLUDED, HOUR, 1),
    "excluded by hand, without end": ((out(40 * DAY, None, By.USER),), State.EXCLUDED, None, 0),
    "the time is over": ((out(HOUR),), State.DUE, 0.0, 1),
    "by hand, and the time is over": ((out(HOUR, HOUR, By.USER),), State.FINE, None, 0),
    "passed the check": (
        (mark(Sign.DEVICE, ago=2 * HOUR), out(2 * HOUR), back(600, By.CHECK)),
        State.PROBATION,
        None,
        1,
    ),
    "probation is over": ((out(2 * DAY), back(DAY, By.CHECK)), State.FINE, None, 1),
    "a mark on probation": ((out(2 * HOUR), back(600, By.CHECK), mark(Sign.HANG)), State.PROBATION, None, 1),
    "admitted by hand": ((mark(Sign.DEVICE), out(600), back(0, By.USER)), State.FINE, None, 0),
    "admitted without being excluded": ((mark(Sign.LOST), back(0, By.USER)), State.FINE, None, 0),
    "wrongly excluded": ((*TWO, out(600), back(0, By.POLICY)), State.FINE, None, 0),
    "wrongly the second time": ((out(DAY), back(9, By.CHECK), out(8), back(0, By.POLICY)), State.PROBATION, None, 1),
    "by hand after the policy": ((out(600), out(300, 60.0, By.USER)), State.FINE, None, 1),
    "long ago": ((out(60 * DAY), back(59 * DAY, By.CHECK)), State.FINE, None, 0),
}


@pytest.mark.parametrize("name", STANDINGS)
def test_standing(name: str) -> None:
    entries, state, left, before = STANDINGS[name]
    where = standing(Host(0, 0, entries), RULES, NOW)
    assert (where.state, where.left, where.before) == (state, left, before)


def test_without_a_check_a_node_comes_back_on_probation() -> None:
    host = Host(0, 0, (out(HOUR),))
    assert standing(host, replace(RULES, check=False), NOW).state is State.PROBATION
    assert standing(host, replace(RULES, check=False), NOW + DAY).state is State.FINE


SHARED = mark(Sign.SEGFAULT, 3, fingerprint="aaaa")

# name: (hosts, who is left out, part of the reason)
REVIEWS = {
    "a device": (four(a=(mark(Sign.DEVICE),)), "a", "device in 1"),
    "lost once": (four(a=(mark(Sign.LOST),)), "", ""),
    "lost twice": (four(a=TWO), "a", "loss of the node, 2 times in 1d, last: lost in 2"),
    "lost twice, long ago": (four(a=(mark(Sign.LOST, 1, ago=DAY), mark(Sign.LOST, 2))), "", ""),
    "two lost at once, twice": (four(a=TWO, b=TWO), "", ""),
    "two lost, each by itself": (four(a=TWO, b=(mark(Sign.LOST, 3), mark(Sign.LOST, 4))), "a", "loss"),
    "most of them lost now and then": (four(a=TWO, b=(mark(Sign.LOST, 3),), c=(mark(Sign.LOST, 4),)), "", ""),
    "one of two others was lost, too": (book(a=TWO, b=(mark(Sign.LOST, 3),), c=()), "a", "loss"),
    "crashes of one node": (four(a=(mark(Sign.SEGFAULT, 1), mark(Sign.SEGFAULT, 2))), "a", "crash in native code, 2"),
    "the same crash on two": (four(a=(replace(SHARED, attempt=1), SHARED), b=(replace(SHARED, attempt=2),)), "", ""),
    "contained errors": (four(a=tuple(mark(Sign.CONTAINED, n) for n in (1, 2, 3))), "a", "3 times"),
    "different signs": (four(a=(mark(Sign.SEGFAULT, 1), mark(Sign.LOST, 2), mark(Sign.HANG, 3))), "", ""),
    "on probation": (four(a=(out(2 * HOUR), back(600, By.CHECK), mark(Sign.LOST))), "a", "it was on probation"),
    "after a user's word": (four(a=(mark(Sign.LOST, 1), back(0, By.USER), mark(Sign.LOST, 2))), "", ""),
}


@pytest.mark.parametrize("name", REVIEWS)
def test_review(name: str) -> None:
    hosts, expected, part = REVIEWS[name]
    left_out = policy.excluded(policy.review(hosts, FOUR, RULES, NOW), RULES, NOW)
    assert set(left_out) == set(expected)
    assert part in "".join(left_out.values())


def test_nobody_is_left_out_where_the_job_says_so() -> None:
    hosts = four(a=(mark(Sign.DEVICE),))
    assert policy.review(hosts, FOUR, replace(RULES, exclude=False), NOW) == hosts
    never = Nodes.model_validate({"after": {"device": None}})
    assert policy.review(hosts, FOUR, rules(never), NOW) == hosts


def test_each_time_is_four_times_as_long() -> None:
    hosts, times = four(), []
    for turn in range(10):
        now = NOW + 100 * turn
        hosts = policy.review(hosts.add("a", Marked(now, Sign.DEVICE, "sick", turn)), FOUR, RULES, now)
        last = hosts.hosts["a"].entries[-1]
        assert isinstance(last, Excluded)
        times.append(last.seconds)
        hosts = hosts.add("a", Admitted(now, By.CHECK, ""))
    assert times[:4] == [HOUR, 4 * HOUR, 16 * HOUR, 64 * HOUR]
    assert times[-1] == RULES.longest


def test_the_same_failure_elsewhere_clears_a_node() -> None:
    crashes = tuple(mark(Sign.SEGFAULT, n, 600, "aaaa") for n in (1, 2))
    hosts = policy.review(four(a=crashes), FOUR, RULES, NOW - 600)
    assert set(policy.excluded(hosts, RULES, NOW)) == {"a"}
    other = policy.review(hosts.add("b", mark(Sign.SEGFAULT, 3, fingerprint="bbbb")), FOUR, RULES, NOW)
    assert set(policy.excluded(other, RULES, NOW)) == {"a"}
    same = hosts.add("b", mark(Sign.SEGFAULT, 3, fingerprint="aaaa"))
    cleared = policy.review(same, FOUR, RULES, NOW)
    assert policy.excluded(cleared, RULES, NOW) == {}
    assert "it isn't the node" in policy.news("a", cleared.hosts["a"].entries[-1])
    # And the bug, which now follows rank 0 to node b, doesn't have that one left out in turn.
    again = policy.review(cleared.add("b", mark(Sign.SEGFAULT, 4, fingerprint="aaaa")), FOUR, RULES, NOW)
    assert policy.excluded(again, RULES, NOW) == {}


def test_a_node_that_fails_the_check_stays_out_for_longer() -> None:
    hosts = four(a=(mark(Sign.DEVICE, ago=HOUR), out(HOUR)))
    failed = policy.after_check(hosts, "a", "processor 3: 7 wrong numbers", RULES, NOW)
    where = standing(failed.hosts["a"], RULES, NOW)
    assert (where.state, where.left) == (State.EXCLUDED, 4 * HOUR)
    assert "7 wrong numbers" in policy.excluded(failed, RULES, NOW)["a"]
    passed = policy.after_check(hosts, "a", "", RULES, NOW)
    assert standing(passed.hosts["a"], RULES, NOW).state is State.PROBATION
    assert policy.after_check(passed, "a", "late", RULES, NOW) == passed
    assert policy.after_check(passed, "nobody", "late", RULES, NOW) == passed


def test_a_mark_counts_once_in_an_attempt_and_not_while_left_out() -> None:
    hosts = book()
    for attempt in (1, 1, 2):
        hosts = policy.marked(hosts, "a", Mark(Sign.LOST, "gone", attempt), RULES, NOW)
    assert len(hosts.hosts["a"].entries) == 2
    hosts = policy.review(hosts, FOUR, RULES, NOW)
    assert policy.marked(hosts, "a", Mark(Sign.LOST, "gone", 3), RULES, NOW) == hosts


# name: (how many there are, present, needed, excluded already, part of the refusal; empty for none)
BREAKER = {
    "one of three": (3, "abc", 2, "", ""),
    "one of two": (2, "ab", 1, "", "0 of 2 nodes are excluded, and health.nodes.most allows 0"),
    "too few left": (3, "abc", 3, "", "that would leave 2 nodes, and 3 are needed (--nnodes)"),
    "a spare takes its place": (4, "abcd", 3, "", ""),
    "the second of five": (5, "bcde", 1, "e", "1 of 5 nodes are excluded"),
    "the second of six": (6, "abcdef", 1, "f", ""),
    "one that has gone is missed, too": (4, "bc", 2, "", ""),
    "and needed": (4, "bc", 3, "", "that would leave 2 nodes"),
}


@pytest.mark.parametrize("name", BREAKER)
def test_breaker(name: str) -> None:
    number, present, needed, gone, refusal = BREAKER[name]
    hosts = book(**dict.fromkeys("abcdef"[:number], ()) | {each: (out(9, None, By.USER),) for each in gone})
    crowd = Crowd(frozenset(present), needed)
    reviewed = policy.review(hosts.add("a", mark(Sign.DEVICE)), crowd, RULES, NOW)
    assert ("a" in policy.excluded(reviewed, RULES, NOW)) == (not refusal)
    last = reviewed.hosts["a"].entries[-1]
    if refusal:
        assert isinstance(last, Withheld)
        assert refusal in last.reason
        assert refusal in standing(reviewed.hosts["a"], RULES, NOW).withheld
        assert policy.news("a", last).startswith("a stays: device in 1; but ")
    assert policy.review(reviewed, crowd, RULES, NOW) == reviewed  # said once


def test_the_surest_go_first() -> None:
    hosts = four(a=TWO, b=(mark(Sign.DEVICE),))
    assert set(policy.excluded(policy.review(hosts, FOUR, RULES, NOW), RULES, NOW)) == {"b"}


@pytest.mark.parametrize(
    ("number", "most", "allowed"),
    [(1, "1/3", 0), (2, "1/3", 0), (3, "1/3", 1), (5, "1/3", 1), (6, "1/3", 2), (100, "1/3", 33), (8, "1/2", 4),
     (3, "10%", 1), (9, "0%", 0), (40, "10%", 4)],
)  # fmt: skip
def test_allowed_out(number: int, most: str, allowed: int) -> None:
    assert policy.allowed_out(number, rules(Nodes.model_validate({"most": most})).most) == allowed


# Properties

NAMES = "abcdefg"
TIMES = st.floats(0, 40 * DAY)
SIGNS = st.sampled_from(Sign)
STEPS = st.one_of(
    st.tuples(st.just("mark"), st.sampled_from(NAMES), SIGNS, st.integers(1, 6), st.sampled_from(["", "aaaa", "bbbb"])),
    st.tuples(st.just("hand"), st.sampled_from(NAMES), st.sampled_from([None, 60.0, DAY])),
    st.tuples(st.just("admit"), st.sampled_from(NAMES)),
    st.tuples(st.just("check"), st.sampled_from(NAMES), st.sampled_from(["", "wrong"])),
    st.tuples(st.just("wait"), st.floats(0, 3 * DAY)),
    st.tuples(st.just("there"), st.frozensets(st.sampled_from(NAMES))),
)


def play(steps: list[tuple[object, ...]], crowd: Crowd, some: Rules) -> list[tuple[Book, Book, Crowd, float]]:
    """The book before and after each review."""
    now, hosts, seen = NOW, Book().saw(crowd.present, NOW), []
    for what, *more in steps:
        if what == "wait":
            now += float(more[0])
        elif what == "there":
            crowd = replace(crowd, present=more[0])
            hosts = hosts.saw(crowd.present, now)
        elif what == "mark":
            name, sign, attempt, fingerprint = more
            hosts = policy.marked(hosts, name, Mark(sign, "it", attempt, None, fingerprint), some, now)
        elif what == "hand":
            hosts = hosts.add(more[0], Excluded(now, By.USER, "", more[1]))
        elif what == "admit":
            hosts = hosts.add(more[0], Admitted(now, By.USER, ""))
        else:
            hosts = policy.after_check(hosts, more[0], more[1], some, now)
        before, hosts = hosts, policy.review(hosts, crowd, some, now)
        seen.append((before, hosts, crowd, now))
    return seen


@settings(deadline=None)
@given(st.lists(STEPS, max_size=30), st.frozensets(st.sampled_from(NAMES)), st.integers(1, 5), st.booleans())
def test_the_policy_never_leaves_out_too_many(
    steps: list[tuple[object, ...]], present: frozenset[str], least: int, check: bool
) -> None:
    some = replace(RULES, check=check)
    for before, after, crowd, now in play(steps, Crowd(present, least), some):
        out_before, out_after = (set(policy.excluded(each, some, now)) for each in (before, after))
        if new := out_after - out_before:
            assert len(out_after) <= policy.allowed_out(len(NAMES), some.most)
            assert len(crowd.present - out_after) >= least
        for name in new:
            assert isinstance(after.hosts[name].entries[-1], Excluded)
        # What a user has said stands.
        for name, host in before.hosts.items():
            last = next((each for each in reversed(host.entries) if isinstance(each, Excluded | Admitted)), None)
            if isinstance(last, Excluded) and last.by is By.USER and name in out_before:
                assert name in out_after
        assert policy.review(after, crowd, some, now) == after


@settings(deadline=None)
@given(st.lists(STEPS, max_size=20), st.frozensets(st.sampled_from(NAMES)))
def test_what_is_written_is_read_back(steps: list[tuple[object, ...]], present: frozenset[str]) -> None:
    for _, after, _, _ in play(steps, Crowd(present), RULES)[-1:]:
        assert history.from_json(json.loads(json.dumps(history.to_json(after)))) == after


@settings(deadline=None)
@given(st.lists(STEPS, max_size=20), st.frozensets(st.sampled_from(NAMES)))
def test_no_exclusion_by_the_policy_lasts_for_ever(steps: list[tuple[object, ...]], present: frozenset[str]) -> None:
    for _, after, _, now in play(steps, Crowd(present), RULES)[-1:]:
        for name, host in after.hosts.items():
            where = standing(host, RULES, now + RULES.longest)
            if where.state is State.EXCLUDED:
                assert where.exclusion is not None
                assert where.exclusion.by is By.USER
                assert policy.after_check(after, name, "", RULES, now) == after


@settings(deadline=None)
@given(st.integers(0, 2000))
def test_times_grow_up_to_a_limit(before: int) -> None:
    assert lasts(before, RULES) <= lasts(before + 1, RULES) <= RULES.longest


def test_nodes_long_gone_are_forgotten_and_the_record_stays_small() -> None:
    hosts = book(a=(), b=(out(9, None, By.USER),), c=(mark(Sign.LOST),))
    later = NOW + 100 * DAY
    assert set(policy.forget(hosts, RULES, NOW).hosts) == set("abc")
    assert set(policy.forget(hosts, RULES, later).hosts) == {"b"}
    assert set(policy.forget(hosts.saw("a", later), RULES, later).hosts) == {"a", "b"}
    for attempt in range(1000):
        hosts = hosts.add("a", mark(Sign.LOST, attempt))
    assert len(hosts.hosts["a"].entries) == 200


@pytest.mark.parametrize(
    "document",
    [None, [], {}, {"hosts": []}, {"hosts": {"a": 1}}, {"hosts": {"a": {"first_seen": 0, "last_seen": 0}}},
     {"hosts": {"a": {"first_seen": 0, "last_seen": 0, "history": [{"what": "eaten"}]}}},
     {"hosts": {"a": {"first_seen": 0, "last_seen": 0, "history": [{"what": "failed", "sign": "lost"}]}}},
     {"hosts": {"a": {"first_seen": 0, "last_seen": 0, "history": [{"what": "admitted", "at": "x", "by": "user"}]}}},
     {"hosts": {"a": {"first_seen": 10**400, "last_seen": 0, "history": []}}},
     {"hosts": {"a": {"first_seen": 0, "last_seen": 0, "history": [{"what": "admitted", "at": None, "by": "user"}]}}}],
)  # fmt: skip
def test_what_is_no_record_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match=r"record|lacks|is .x|at is None"):
        history.from_json(document)


def test_a_third_is_a_third() -> None:
    assert RULES.most == Fraction(1, 3)


def test_nodes_that_keep_failing_are_kept_out_and_others_are_not() -> None:
    """63 nodes for 73 days; three fail every two days, the others as often as those of Llama 3's training did."""
    some, names = rules(Nodes()), [f"n{number:02}" for number in range(63)]
    lemons, crowd = set(names[:3]), Crowd(frozenset(names), 50)
    signs = [*[Sign.LOST] * 4, *[Sign.DEVICE] * 3, Sign.SEGFAULT, Sign.KILLED, Sign.HANG]
    failures = {"lemons": 0, "lemons that are kept out": 0, "others": 0}
    days_out, random = 0.0, Random(7)
    moments = sorted(
        (random.random() * 73 * DAY, name)
        for name in names
        for _ in range(round(73 / 2) if name in lemons else random.random() < 73 * 3.79e-3)
    )
    hosts = Book().saw(names, 0.0)
    for attempt, (now, name) in enumerate(moments, 1):
        hosts = policy.after_check(hosts, name, "", some, now)
        if name in policy.excluded(hosts, some, now):
            failures["lemons that are kept out"] += name in lemons
            continue
        failures["lemons" if name in lemons else "others"] += 1
        mark = Mark(random.choice(signs), "it", attempt, None, f"{random.random()}")
        before = set(policy.excluded(hosts, some, now))
        hosts = policy.review(policy.marked(hosts.saw(names, now), name, mark, some, now), crowd, some, now)
        for new in policy.excluded(hosts, some, now).keys() - before - lemons:
            days_out += (standing(hosts.hosts[new], some, now).left or 0.0) / DAY
    print(failures, f"{days_out:.1f} days of others lost")
    assert failures["lemons that are kept out"] > 2 * failures["lemons"]
    assert days_out < 0.005 * 60 * 73
