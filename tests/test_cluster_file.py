from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.errors import UserError

CLUSTERS = Path(__file__).parents[1] / "clusters"

GOOD = """
name: two
servers:
  - {name: a, tflops: 20, memory_gb: 12, users: 3}
  - {name: b, tflops: 40, memory_gb: 24, users: 1}
links:
  default: {gbps: 8, ms: 1}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_units_and_default_link(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, GOOD))
    assert cluster.server_names == ("a", "b")
    assert cluster.memory_ratio is None
    assert cluster.memory_bytes.tolist() == [12 * 10**9, 24 * 10**9]
    np.testing.assert_allclose(cluster.flops_per_s, [20e12, 40e12])
    np.testing.assert_allclose(cluster.access_share, [0.75, 0.25])
    # 8 Gbps move 10^6 bytes in 1 ms, after 1 ms of delay.
    np.testing.assert_allclose(cluster.transfer_s(1e6), [[0, 2e-3], [2e-3, 0]])


def test_pairs_hold_both_ways_unless_the_reverse_is_given(tmp_path: Path) -> None:
    pairs = """
  pairs:
    - {between: [a, b], gbps: 1, ms: 5}
"""
    cluster = load_cluster(written(tmp_path, GOOD + pairs.lstrip("\n")))
    np.testing.assert_allclose(cluster.delay_s, [[0, 5e-3], [5e-3, 0]])
    reverse = pairs + "    - {between: [b, a], gbps: 2, ms: 7}\n"
    cluster = load_cluster(written(tmp_path, GOOD + reverse.lstrip("\n")))
    np.testing.assert_allclose(cluster.delay_s, [[0, 5e-3], [7e-3, 0]])
    assert cluster.bandwidth_bytes_per_s[1, 0] == 2e9 / 8


def test_a_server_computes_on_its_best_device_unless_the_file_says_which(tmp_path: Path) -> None:
    two = """
name: two
servers:
  - {name: a, tflops: 1, memory_gb: 1, device: "cuda:1"}
  - {name: b, tflops: 1, memory_gb: 1}
links: {default: {gbps: 1, ms: 1}}
"""
    (tmp_path / "two.yaml").write_text(two)
    cluster = load_cluster(tmp_path / "two.yaml")
    assert [cluster.device(server) for server in range(2)] == ["cuda:1", "auto"]
    (tmp_path / "two.yaml").write_text(two.replace("cuda:1", "teapot"))
    with pytest.raises(UserError, match=r"servers\[0\].device.*write auto, cpu, cuda"):
        load_cluster(tmp_path / "two.yaml")


def test_a_lone_server_needs_no_links(tmp_path: Path) -> None:
    text = "name: one\nservers:\n  - {name: a, tflops: 20, memory_gb: 12}\n"
    cluster = load_cluster(written(tmp_path, text))
    assert cluster.access_share.tolist() == [1.0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gbps: 8", "gbps: -8", ["links.default.gbps", "-8", "above zero"]),
        ("gbps: 8", "gbps: 0", ["links.default.gbps", "above zero"]),
        ("gbps: 8", "gbps: .inf", ["links.default.gbps", "finite"]),
        ("gbps: 8", "gbps: .nan", ["links.default.gbps"]),
        ("gbps: 8", "gbps: fast", ["links.default.gbps", "fast", "plain number"]),
        ("gbps: 8", "gbps: yes", ["links.default.gbps", "plain number"]),
        ("ms: 1", "ms: -1", ["links.default.ms", "not be negative"]),
        ("ms: 1", "ms: 1, jitter: 3", ["links.default.jitter", "not a known key"]),
        ("tflops: 40", "tflops: 0", ["servers[1].tflops (server b)", "above zero"]),
        ("tflops: 40, ", "", ["servers[1].tflops", "missing"]),
        ("memory_gb: 12", "memory_gb: -1", ["servers[0].memory_gb (server a)"]),
        ("memory_gb: 12", "memory_gb: 1.0e+300", ["servers[0].memory_gb", "more than there is"]),
        ("name: b", "name: a", ["servers[1].name", "two servers are called a", "rename"]),
        ("name: b", 'name: ""', ["servers[1].name", "empty"]),
        ("name: b", 'name: "  "', ["servers[1].name", "empty"]),
        ("name: two", 'name: ""', ["`name`", "empty"]),
        ("name: two", "nam: two", ["`name`", "missing"]),
        ("name: two", "name: two\nmemory_ratio: 0", ["memory_ratio", "above zero"]),
        ("name: two", "name: two\nname: three", ["line 3", "given twice"]),
        ("users: 3", "users: -3", ["servers[0].users (server a)", "not be negative"]),
        ("users: 3", "users: .inf", ["servers[0].users", "finite"]),
        ("default:", "standard:", ["links.standard", "not a known key"]),
        ("  default: {gbps: 8, ms: 1}", "  pairs: []", ["a and b", "between: [a, b]"]),
    ],
)
def test_every_problem_names_its_place(
    tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    assert old in GOOD
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        load_cluster(path)
    message = str(caught.value)
    for word in [str(path), *words]:
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ("{between: [a, c], gbps: 1, ms: 1}", ["pairs[0]", "names c", "a, b"]),
        ("{between: [a, a], gbps: 1, ms: 1}", ["pairs[0]", "with itself"]),
        ("{between: [a], gbps: 1, ms: 1}", ["pairs[0].between"]),
        ("{between: [a, b], gbps: 1}", ["pairs[0].ms", "missing"]),
    ],
)
def test_bad_pairs(tmp_path: Path, pairs: str, words: list[str]) -> None:
    path = written(tmp_path, f"{GOOD}  pairs:\n    - {pairs}\n")
    with pytest.raises(UserError) as caught:
        load_cluster(path)
    assert all(word in str(caught.value) for word in words)


def test_a_link_given_twice_is_refused(tmp_path: Path) -> None:
    line = "    - {between: [a, b], gbps: 1, ms: 1}\n"
    with pytest.raises(UserError, match="from a to b again"):
        load_cluster(written(tmp_path, f"{GOOD}  pairs:\n{line}{line}"))


def test_users_must_be_somewhere(tmp_path: Path) -> None:
    text = GOOD.replace("users: 3", "users: 0").replace("users: 1", "users: 0")
    with pytest.raises(UserError, match="zero; give at least one"):
        load_cluster(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: x\nservers: []\n", "list at least one server"),
        ("name: x\n", "`servers` is missing"),
        ("", "must be a mapping"),
        ("- 1\n- 2\n", "must be a mapping"),
        ("name: [unclosed\n", "not valid YAML"),
        ("a\tb: :\n  - c\n", "not valid YAML"),
    ],
)
def test_not_a_cluster_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_cluster(written(tmp_path, text))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no cluster file"):
        load_cluster(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="Cannot read"):
        load_cluster(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="Cannot read"):
        load_cluster(binary)


def test_testbed10_lies_in_the_ranges_of_the_paper() -> None:
    cluster = load_cluster(CLUSTERS / "testbed10.yaml")
    between = ~np.eye(10, dtype=bool)
    gbps = cluster.bandwidth_bytes_per_s[between] * 8 / 1e9
    assert (cluster.server_count, cluster.memory_ratio) == (10, 2.0)
    assert (cluster.flops_per_s.min(), cluster.flops_per_s.max()) == (18e12, 120e12)
    assert (cluster.memory_bytes.min(), cluster.memory_bytes.max()) == (12e9, 48e9)
    assert (gbps.min(), gbps.max()) == (0.8, 10.0)
    delays = cluster.delay_s[between]
    np.testing.assert_allclose([delays.min(), delays.max()], [0.3e-3, 22e-3])
    np.testing.assert_array_equal(cluster.delay_s, cluster.delay_s.T)
    assert cluster.access_share.sum() == pytest.approx(1.0)


def test_home3_loads() -> None:
    cluster = load_cluster(CLUSTERS / "home3.yaml")
    assert (cluster.server_count, cluster.memory_ratio) == (3, None)
