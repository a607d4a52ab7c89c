"""Configuration: four sources, one tree, and a refusal with a name for everything else."""

from __future__ import annotations

import builtins
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.config import Config, CpuConfig, Size, TierConfig, markdown, memory_limit
from lmkv.errors import ConfigError, nearest

GIB = 1 << 30


def load(path: Path | None = None, env: dict[str, str] | None = None, **overrides: Any) -> Config:
    return Config.load(path, env or {}, **overrides)


def refusal(path: Path | None = None, env: dict[str, str] | None = None, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, env, **overrides)
    assert str(caught.value).startswith(caught.value.key + ": ")
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str, name: str = "lmkv.toml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


# Sizes


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (8 * GIB, 8 * GIB),
        ("8589934592", 8 * GIB),
        ("8GiB", 8 * GIB),
        (" 8 gib ", 8 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("500MB", 500_000_000),
        ("64KiB", 65536),
        ("2TB", 2 * 10**12),
        ("4096b", 4096),
    ],
)
def test_size_in_bytes(written: object, nbytes: int) -> None:
    assert Size.parse(written).resolve(123) == nbytes


@pytest.mark.parametrize("written", [0.25, "0.25", ".25", "25%", "25 %", "2.5e-1"])
def test_size_as_fraction_of_a_total(written: object) -> None:
    assert Size.parse(written).resolve(16 * GIB) == 4 * GIB


def test_whole_number_with_a_point_is_a_fraction() -> None:
    assert Size.parse(1.0).resolve(GIB) == Size.parse("100%").resolve(GIB) == GIB
    assert Size.parse("8192").resolve(GIB) == 8192


@pytest.mark.parametrize(
    "written",
    [0, -1, "0", "-8GiB", "0GiB", 8, "8", "1.5", 2.5, "0.0", "150%", "0%", "8 parsecs", "8Gb/s", "",
     "GiB", "1e400GiB", "9" * 5000, 1 << 70, True, False, None, [], {"nbytes": 5}, "nan", "inf",
     float("nan"), float("inf"), "1_000_000", "٣GiB", "0x1000"],
)  # fmt: skip
def test_what_is_no_size_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="is not a size: write 8GiB"):
        Size.parse(written)


@settings(deadline=None)
@given(st.integers(4096, 2**62))
def test_bytes_print_back_as_the_same_size(nbytes: int) -> None:
    size = Size.parse(nbytes)
    assert size.nbytes == nbytes
    assert Size.parse(str(size)) == Size.parse(str(nbytes)) == size


@settings(deadline=None)
@given(st.floats(0, 1, exclude_min=True))
def test_fractions_print_back_as_the_same_size(fraction: float) -> None:
    assert Size.parse(str(Size.parse(fraction))) == Size(fraction=fraction)


@settings(deadline=None)
@given(st.integers(1, 4000), st.sampled_from(["KiB", "MiB", "GiB"]), st.integers(0, 999))
def test_decimal_sizes_are_exact_to_a_byte(whole: int, unit: str, thousandths: int) -> None:
    scale = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    exact = (whole * 1000 + thousandths) * scale / 1000
    if exact >= 4096:
        assert abs(Size.parse(f"{whole}.{thousandths:03}{unit}").nbytes - exact) <= 1


@settings(deadline=None)
@given(st.text(max_size=12) | st.floats() | st.integers() | st.booleans() | st.none())
def test_any_value_is_a_positive_size_or_refused(value: object) -> None:
    try:
        size = Size.parse(value)
    except ValueError:
        return
    assert size.nbytes >= 4096 or 0 < size.fraction <= 1
    assert 0 <= size.resolve(1 << 62) <= 1 << 63


# Sources and their order


def test_defaults() -> None:
    config = load()
    assert config.chunk_tokens == 256
    assert config.cpu.budget == Size(fraction=0.25)
    assert config.cpu.slab == 64 << 20
    assert config.tiers == ()
    assert {origin for _, _, origin in config.rows()} == {"default"}


def test_later_sources_win_key_by_key(toml: Any) -> None:
    path = toml('chunk_tokens = 64\nmin_hit_tokens = 7\n[cpu]\nbudget = "1GiB"\nslab = "2MiB"\n')
    env = {"LMKV_CPU_BUDGET": "2GiB", "LMKV_CPU_TOUCH": "no", "LMKV_CHUNK_TOKENS": "128"}
    config = load(path, env, chunk_tokens=512, cpu={"huge_pages": False})
    rows = {key: (value, origin) for key, value, origin in config.rows()}
    assert rows["chunk_tokens"] == ("512", "argument")
    assert rows["min_hit_tokens"] == ("7", f"file {path}")
    assert rows["cpu.budget"] == ("2GiB", "env LMKV_CPU_BUDGET")
    assert rows["cpu.slab"] == ("2MiB", f"file {path}")
    assert rows["cpu.touch"] == ("false", "env LMKV_CPU_TOUCH")
    assert rows["cpu.huge_pages"] == ("false", "argument")
    assert rows["close_timeout"] == ("5.0", "default")


def test_file_from_the_environment(toml: Any) -> None:
    path = toml("chunk_tokens = 64\n")
    assert load(env={"LMKV_CONFIG": str(path)}).chunk_tokens == 64
    other = toml("chunk_tokens = 32\n", "other.toml")
    assert load(other, {"LMKV_CONFIG": str(path)}).chunk_tokens == 32


def test_yaml_and_toml_make_the_same_tree(toml: Any) -> None:
    a = toml('operation_timeout = "2m"\n[cpu]\nbudget = 0.5\n[[tiers]]\nurl = "disk:///a"\nmax_write_delay = 9\n')
    b = toml("operation_timeout: 2m\ncpu: {budget: 0.5}\ntiers:\n- {url: 'disk:///a', max_write_delay: 9}\n", "b.yaml")
    assert load(a).model_dump() == load(b).model_dump()
    assert load(a).operation_timeout == 120


def test_empty_files_are_the_defaults(toml: Any) -> None:
    assert load(toml("")).model_dump() == load(toml("", "b.yml")).model_dump() == load().model_dump()


def test_flat_and_nested_arguments_are_the_same() -> None:
    flat = load(cpu_budget="1GiB")
    assert flat == load(cpu={"budget": GIB}) == load(cpu=CpuConfig(budget=Size(nbytes=GIB)))
    assert flat == load(**{"cpu.budget": "1024MiB"})
    assert flat.origin("cpu.budget") == "argument"
    assert flat.origin("cpu.slab") == "default"


def test_override_keeps_the_other_values_and_their_origins(toml: Any) -> None:
    path = toml('chunk_tokens = 64\n[cpu]\nslab = "2MiB"\n[[tiers]]\nurl = "disk:///a?fsync=1"\n')
    config = load(path).override(cpu_budget="1GiB", min_hit_tokens=5)
    assert (config.chunk_tokens, config.cpu.slab, config.min_hit_tokens) == (64, 2 << 20, 5)
    assert config.tiers[0].url == "disk:///a?fsync=1"
    assert config.origin("chunk_tokens") == config.origin("tiers.0.url") == f"file {path}"
    assert config.origin("cpu.budget") == "argument"
    assert config.override().model_dump() == config.model_dump()


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        setattr(load(), "chunk_tokens", 3)  # noqa: B010


# Tiers


def test_tier_as_url_and_as_table_are_the_same() -> None:
    url = "disk:///var/cache,/mnt?fsync=1&budget=10GiB&codec=zstd&level=3&max_write_delay=7d&direct=off"
    (tier,) = load(tiers=[url]).tiers
    assert tier.url == "disk:///var/cache,/mnt?fsync=1&direct=off"
    table = {"url": tier.url, "budget": "10GiB", "codec": "zstd", "level": 3, "max_write_delay": 604800}
    assert load(tiers=[table]).tiers == load(tiers=[tier]).tiers == (tier,)


def test_tiers_from_the_environment_replace_those_of_the_file(toml: Any) -> None:
    path = toml('[[tiers]]\nurl = "disk:///file"\n')
    config = load(path, {"LMKV_TIERS": "disk:///a?budget=1GiB  disk:///b?readers=8"})
    assert [tier.url for tier in config.tiers] == ["disk:///a", "disk:///b"]
    assert config.tiers[0].budget == Size(nbytes=GIB)
    assert (config.tiers[1].readers, config.tiers[1].budget) == (8, Size(fraction=0.5))
    assert config.origin("tiers.1.readers") == "env LMKV_TIERS"
    assert config.origin("tiers.1.budget") == "default"
    assert load(path, {"LMKV_TIERS": ""}).tiers == ()


# Refusals


@pytest.mark.parametrize("value", ["false", "False", "0", "no", "off", False, 0])
def test_words_for_false(value: object) -> None:
    assert load(cpu_touch=value).cpu.touch is False


@pytest.mark.parametrize("value", ["true", "1", "yes", "on", True, 1])
def test_words_for_true(value: object) -> None:
    assert load(cpu_touch=value).cpu.touch is True


@pytest.mark.parametrize("value", ["", "maybe", "2", 2, None])
def test_other_words_are_no_switch(value: object) -> None:
    assert refusal(cpu_touch=value).startswith(f"cpu.touch: {str(value)!r} should be a valid boolean")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"chunk_token": 3}, "chunk_token: unknown key; did you mean 'chunk_tokens'? (from"),
        ({"budget": "1GiB"}, "budget: unknown key; did you mean 'cpu.budget'? (from argument)"),
        ({"cpu": {"bugdet": 1}}, "cpu.bugdet: unknown key; did you mean 'budget'? (from argument)"),
        ({"qqq": "1GiB"}, "qqq: unknown key; known: chunk_tokens, "),
        ({"cpu": "8GiB"}, "cpu: '8GiB' should be a table"),
        ({"tiers": [{"url": "disk:///a", "codek": "raw"}]},
         "tiers.0.codek: unknown key; did you mean 'codec'?"),
        ({"tiers": [{"budget": "1GiB"}]}, "tiers.0.url: is required"),
        ({"tiers": ["disk:///a", "/var/cache"]},
         "tiers.1: '/var/cache' is not a URL: a folder is written disk:///path"),
        ({"tiers": ["disk:///a?budget=1GiB&budget=2GiB"]},
         "tiers.0: 'disk:///a?budget=1GiB&budget=2GiB' sets budget twice"),
        ({"tiers": [{"url": "disk:///a?codec=raw", "codec": "zstd"}]}, "tiers.0: "),
        ({"tiers": ["disk:///a?fsync=0", "disk:///a?fsync=1"]}, "tiers: "),
        ({"tiers": 3}, "tiers: '3' should be a valid tuple"),
        ({"tiers": ["disk:///a?admission=second"]},
         "tiers.0.admission: 'second' should be 'all', 'second_touch' or 'on_eviction'"),
        ({"tiers": ["disk:///a?budget=0"]}, "tiers.0.budget: '0' is not a size: write 8GiB"),
    ],
)  # fmt: skip
def test_unknown_and_misplaced_arguments_are_named(overrides: Any, message: str) -> None:
    assert refusal(**overrides).startswith(message)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chunk_tokens", 0),
        ("chunk_tokens", -256),
        ("chunk_tokens", 2.5),
        ("chunk_tokens", True),
        ("chunk_tokens", "many"),
        ("copy_threads", -1),
        ("min_hit_tokens", -1),
        ("operation_timeout", 0),
        ("operation_timeout", "-1s"),
        ("operation_timeout", "5 weeks"),
        ("operation_timeout", "inf"),
        ("operation_timeout", "1e400s"),
        ("close_timeout", float("nan")),
        ("close_timeout", True),
        ("cpu_budget", 0),
        ("cpu_budget", "150%"),
        ("cpu_slab", "0.5"),
        ("cpu_lease_timeout", 0),
        ("tiers", ["disk:///a?readers=0"]),
        ("tiers", ["disk:///a?writers=-2"]),
        ("tiers", ["disk:///a?max_write_delay=0"]),
        ("ttl", 0),
    ],
)
def test_values_out_of_range_are_refused_in_arguments(key: str, value: Any) -> None:
    assert "(from argument)" in refusal(**{key: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LMKV_CPU_BUDGT", "1GiB", "LMKV_CPU_BUDGT: unknown variable; did you mean 'LMKV_CPU_BU"),
        ("LMKV_CPU", "1GiB", "LMKV_CPU: unknown variable"),
        ("LMKV_ZWQXJKVYZWQX", "", "LMKV_ZWQXJKVYZWQX: unknown variable; known: LMKV_CHUNK_TOKENS, LMKV_CLOSE_TIMEOUT"),
        ("LMKV_CHUNK_TOKENS", "", "chunk_tokens: '' should be a valid integer"),
        ("LMKV_CPU_BUDGET", "8", "cpu.budget: '8' is not a size: write 8GiB"),
        ("LMKV_TIERS", "/var/cache", "tiers.0: '/var/cache' is not a URL"),
        ("LMKV_CONFIG", "/nowhere/lmkv.toml", "config: cannot read '/nowhere/lmkv.toml'"),
        ("LMKV_CONFIG", "", "config: cannot read '.': [Errno 21] Is a directory"),
    ],
)  # fmt: skip
def test_bad_variables_are_refused(name: str, value: str, message: str) -> None:
    text = refusal(env={name: value, "PATH": "/bin", "lmkv_cpu": "x"})
    assert text.startswith(message)
    assert name in text or name == "LMKV_CONFIG"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_tokens = 0", "chunk_tokens: '0' should be greater than or equal to 1 (from file "),
        ("[cpu]\nbuget = 1", "cpu.buget: unknown key; did you mean 'budget'? (from file "),
        ("[cpus]\n", "cpus: unknown key; did you mean 'cpu'? (from file "),
        ('"a.b" = 1', "a.b: unknown key"),
        ("cpu = 3", "cpu: 3 should be a table (from file "),
        ("tiers = [3]", "tiers.0: '3' should be a valid dictionary"),
        ("chunk_tokens = [", "config: "),
        ("chunk_tokens = 1\nchunk_tokens = 2", "config: "),
    ],
)
def test_bad_files_are_refused(toml: Any, text: str, message: str) -> None:
    path = toml(text)
    assert refusal(path).startswith(message)
    assert str(path) in refusal(path)


@pytest.mark.parametrize("text", ["[1, 2]", "just text", "a: [", "!!python/object/apply:os.getcwd []"])
def test_bad_yaml_is_refused(toml: Any, text: str) -> None:
    assert refusal(toml(text, "lmkv.yaml")).startswith("config: ")


def test_files_that_cannot_be_read_are_fatal(tmp_path: Path, toml: Any) -> None:
    assert "cannot read" in refusal(tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    assert "cannot read" in refusal(tmp_path / "folder.toml")
    assert "should be a .toml" in refusal(toml("{}", "lmkv.json"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "can't decode" in refusal(tmp_path / "bytes.toml")


def test_yaml_without_pyyaml_says_how_to_install_it(toml: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install pyyaml" in refusal(toml("chunk_tokens: 1", "lmkv.yaml"))


def test_config_does_not_import_yaml_by_itself(toml: Any, monkeypatch: Any) -> None:
    real = builtins.__import__

    def guarded(name: str, *args: Any) -> Any:
        assert name != "yaml"
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", guarded)
    assert load(toml("chunk_tokens = 1")).chunk_tokens == 1


def test_nearest_lists_everything_when_nothing_is_near() -> None:
    assert nearest("zstdd", ["raw", "zstd"]) == "; did you mean 'zstd'?"
    assert nearest("qqqq", ["raw", "zstd"]) == "; known: raw, zstd"


KEYS = st.sampled_from(["cpu", "tiers", "budget", "url", "ttl", "touch", "a.b", ""]) | st.text("a.")
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text("d:/?=&19GiB. ")
TREES = st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(KEYS, x), max_leaves=8)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*Config.model_fields, "x", "a.b", ""]), TREES))
def test_any_tree_is_a_config_or_refused(tree: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(tree, file)
        file.flush()
        try:
            config = load(Path(file.name))
        except ConfigError:
            return
    assert config.chunk_tokens >= 1
    given_again = load(**config.model_dump(exclude_unset=True))
    assert given_again.model_dump() == config.override().model_dump() == config.model_dump()


# The machine


def test_memory_limit_is_the_lowest_of_machine_and_cgroups(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    machine = memory_limit(tmp_path)
    assert machine >= memory_limit()
    write("proc/self/cgroup", "12:memory:/job\n5:cpu,cpuacct:/job\n1:name=systemd:/x\n0::/a/b\n")
    assert memory_limit(tmp_path) == machine
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/a/b/memory.max", "max\n")
    assert memory_limit(tmp_path) == machine
    write("sys/fs/cgroup/a/memory.max", str(machine // 2))
    assert memory_limit(tmp_path) == machine // 2
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712")
    assert memory_limit(tmp_path) == machine // 2
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", str(machine // 4))
    assert memory_limit(tmp_path) == machine // 4


# The page


def test_reference_page_is_up_to_date() -> None:
    page = (Path(__file__).parents[1] / "docs/configuration.md").read_text()
    assert page.split("end of text -->\n")[1] == markdown()


def test_every_key_is_described() -> None:
    for model in (Config, CpuConfig, TierConfig):
        assert all(field.description for field in model.model_fields.values())


@pytest.mark.parametrize("name", ["server", "redis_cluster", "s3"])
def test_the_examples_load(name: str) -> None:
    folder = Path(__file__).parents[1] / "examples" / "deploy"
    assert Config.load(folder / f"{name}.toml", env={}).tiers
