"""A run file with its overrides: what is read, what is refused with its field, and what is never written."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rollmesh.config import load_run_config, text_override, write_run_config
from rollmesh.config.data import PromptSourceConfig
from rollmesh.config.generator import ENGINE_SECTIONS, GeneratorConfig
from rollmesh.config.load import SECRETS, secret_environment
from rollmesh.config.store import parse_redis_url
from rollmesh.errors import ConfigError
from rollmesh.generator.engines import ENGINES
from rollmesh.tasks.sources.source_protocol import SOURCES

from ...kit.run_files import run_config

MINIMAL = {"name": "trial", "folder": "runs/trial", "model": {"path": "models/tiny"}}


@pytest.fixture
def run_file(tmp_path: Path):
    def write(**sections: object) -> Path:
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({**MINIMAL, **sections}))
        return file

    return write


def test_environment_overrides_the_file_and_set_overrides_both(run_file) -> None:
    file = run_file(trainer={"train_steps": 1, "learning_rate": 1e-3})
    environ = {"ROLLMESH_TRAINER__TRAIN_STEPS": "2", "ROLLMESH_TRAINER__LEARNING_RATE": "2e-3"}
    config = load_run_config(file, ["trainer.train_steps=3"], environ)
    assert config.trainer.train_steps == 3
    assert config.trainer.learning_rate == 2e-3


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("schedule.pool_size=many", r"pool_size: expected a whole number .* from 1 on, auto or null \(got 'many'\)"),
        ("trainer.share_prefixes=many", r"1 problem.*\n.*share_prefixes: expected auto, true or false \(got 'many'\)"),
        ("schedule.pool_size=1.5", r"schedule.pool_size: expected a whole number .*\(got 1.5\)"),
        ("shedule={}", r"shedule: unknown key; did you mean schedule\?"),
        ("trainer.algorithm.clip_hi=1", r"trainer.algorithm.clip_hi: unknown key.*clip_high.*got 1"),
        ("trainer.train_steps=many", "trainer.train_steps: .*'many'"),
        ("schedule.group_size=1", "schedule.group_size=1: .* at least 2"),
        ("rollout.top_p=0", r"rollout.top_p: .*greater than 0 \(got 0\)"),
        ("folder=''", r"folder: .*at least 1 character \(got ''\)"),
        ("rollout.top_p=1.01", r"rollout.top_p: .*less than or equal to 1 \(got 1.01\)"),
        ("rollout.min_p=1", r"rollout.min_p: .*less than 1 \(got 1\)"),
        ("rollout.top_k=1", r"rollout.top_k: 1 is greedy: .*set 0 \(off\) or 2"),
        ("rollout.top_k=9 rollout.kept_tokens=8", "rollout: top_k=9 is more than kept_tokens=8.*raise rollout.kept"),
        ("model.trust_remote_code=true", "model.trust_remote_code: unknown key; only model code of transformers"),
        *(
            (
                f'data.source={{"type":"reasoning_gym","task":"chain_sum","options":{{"{name}":7}}}}',
                rf"data.source.reasoning_gym.options: {name}=7 cannot be an option: .*set {remedy}",
            )
            for name, remedy in (("seed", r"the seed of the run \(seed\)"), ("size", "data.source.size"))
        ),
        (
            "schedule.preset=copris_paper trainer.algorithm.old_logprobs=stage_end checkpoints.state_every_steps=2",
            "checkpoints.state_every_steps=2: set 1 with .*old_logprobs=stage_end",
        ),
        ("trainer.algorithm.loss=gsp0", "trainer.algorithm.loss: .*or module:function.*got 'gsp0'"),
        (
            "trainer.algorithm.loss=tis",
            "trainer.algorithm.loss=tis with .*old_logprobs=sampler would .*old_logprobs=recompute",
        ),
        (
            "trainer.algorithm.loss=cispo trainer.algorithm.dual_clip=3",
            "trainer.algorithm.dual_clip=3: .*loss=cispo .*leave dual_clip out, or use loss=ppo_clip",
        ),
        (
            "trainer.algorithm.old_logprobs=recompute generator.on_new_version=keep_kv",
            "old_logprobs=recompute cannot .*on_new_version=interrupt",
        ),
        (
            "model.adapter={} generator.on_new_version=drain",
            r"generator.on_new_version=drain: with model.adapter .*leave it out \(next_slice\)",
        ),
        ("generator.on_new_version=next_slice", "on_new_version=next_slice: .*set model.adapter"),
        (
            'model.adapter.target=["k_proj"] generator.engine=sglang',
            r"model.adapter.target=\['k_proj'\]: .*needs q_proj and v_proj",
        ),
        *(
            (
                f"model.adapter={{}} generator.engine=sglang generator.sglang.arguments={arguments}",
                "generator.sglang.arguments: --dp-size 2: with model.adapter .*generator.replicas",
            )
            for arguments in ('["--dp-size","2"]', '["--tp-size","2","--data-parallel-size=2"]', '["--dp","2"]')
        ),
        (
            "model.adapter.dropout=0.1 trainer.share_prefixes=true",
            "share_prefixes=true with model.adapter.dropout=0.1: .*set share_prefixes=auto or dropout=0",
        ),
        (
            "model.adapter.dropout=0.1 trainer.algorithm.update_scale=ess",
            "update_scale=ess with model.adapter.dropout=0.1: .*set update_scale=none or model.adapter.dropout=0",
        ),
        ("generator.max_context_tokens=100", "generator.max_context_tokens=100 is less than .* = 1536"),
        ("trainer.minibatches=3", "trainer.minibatches=3 does not divide schedule.groups_per_batch=16"),
        ("name=Not-A-Name", "name: expected 1 to 63 lower-case letters.*'Not-A-Name'"),
        ("store.heartbeat_seconds=20 store.session_ttl_seconds=30", "session_ttl_seconds=30 .*heartbeat_seconds=20"),
        ("reward.fixed_value=.nan", "reward.fixed_value: .*finite number"),
        ('data.source={"type":"csv"}', "data.source: .*csv"),
        ('data.source={"type:countdown":null}', "data.source: has no type; write type: with a space"),
        (
            "trainer.algorithm.old_logprobs=ewma trainer.algorithm.old_logprobs_options.reset_below=1.1",
            "old_logprobs_options.reset_below=1.1",
        ),
        ("trainer.learning_rate=1e300", "trainer.learning_rate: expected at most 3.4e"),
        ("trainer.betas=[0.9,1.0]", r"trainer.betas.1: Input should be less than 1 \(got 1.0\)"),
        ("seed=18446744073709551615", "seed: expected a whole number of at most 64 bits"),
        ("trainer.warmup_steps=1" + 30 * "0", "trainer.warmup_steps: expected a whole number"),
        ("security.token=a security.token_file=b", "set only one of them"),
        (r'security.token="\x20"', "security.token is empty"),
        ("store.url=redis://host store.tls.ca=ca.crt", "store.tls is for rediss://"),
        ("store.tls.ca=ca.crt", "store.tls is for rediss://"),
        ("store.url=rediss://host store.tls.key=k", "store.tls.key must be set together"),
        ("store.url=rediss://host store.tls.check_hostname=false", "any server is accepted"),
        ("gateway.token=abc", "gateway.token is shorter than 8 characters"),
        ("checkpoints.folder=ftp://host/x", "checkpoints.folder=ftp://host/x: expected a folder, or one of"),
        ("checkpoints.object_store.endpoint_url=http://a", "checkpoints.object_store is for object stores only"),
        ("checkpoints.folder=s3://b checkpoints.object_store.secret=x", "credentials do not belong in a run file"),
    ],
)
def test_a_wrong_value_is_named_with_its_field_and_what_is_allowed(fields: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_config(fields)


def test_a_pool_may_be_automatic_and_a_correcting_loss_takes_every_trainer_side_source() -> None:
    assert run_config("schedule.pool_size=auto").schedule.pool_size == "auto"
    for loss in ("tis", "decoupled_ppo"):
        for source in ("recompute", "snapshot", "current", "stage_end"):
            run_config(
                f"trainer.algorithm.loss={loss} trainer.algorithm.old_logprobs={source} "
                f"schedule.preset={'copris_paper' if source == 'stage_end' else 'copris'}"
            )


def test_every_name_of_an_engine_and_a_prompt_source_has_one_entry() -> None:
    sources = get_args(get_args(PromptSourceConfig)[0])
    assert set(get_args(GeneratorConfig.model_fields["engine"].annotation)) == set(ENGINE_SECTIONS) == set(ENGINES)
    assert {source.model_fields["type"].default for source in sources} == set(SOURCES)


def test_partials_on_sglang_are_saved_less_often_unless_the_file_says_how_often() -> None:
    sglang = "generator.engine=sglang"
    for fields, tokens in (
        *(("", 64), (sglang, 1024)),
        *((f"{sglang} rollout.temperature=0.7", 1024), (f"{sglang} rollout.partial_save_tokens=32", 32)),
    ):
        assert run_config(fields).rollout.partial_save_tokens == tokens


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b"name: [", "not valid YAML"),
        (b"name: \xff\xfe", "not UTF-8 text"),
        (b"7", "expected a"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_clear_error(tmp_path: Path, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=f"run.yaml: .*{problem}"):
        load_run_config(tmp_path / "run.yaml")


def test_a_key_that_is_set_twice_is_refused_with_both_lines(run_file, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: twice\nmodel: {path: models/tiny}\ntrainer:\n  train_steps: 3\n"
        "  lr: 1.0e-4\n  train_steps: 30\nname: again\n"
    )
    repeated = r"trainer\.train_steps is set more than once, in lines 4 and 6; name is .* in lines 1 and 7; keep one"
    with pytest.raises(ConfigError, match=repeated):
        load_run_config(file, environ={})
    with pytest.raises(ConfigError, match="True is set more than once, in lines 1 and 1"):
        load_run_config(run_file(), ["telemetry.tracker_options={true: 1, yes: 2}"], {})


def test_merge_keys_and_aliases_still_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: merged\nfolder: runs\nmodel: {path: models/tiny}\n"
        "telemetry:\n  tracker_options:\n    a: &a {x: 1, y: 1}\n"
        "    b: {<<: *a, x: 2}\n    c: *a\n"
    )
    options = load_run_config(file, environ={}).telemetry.tracker_options
    assert options == {"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}, "c": {"x": 1, "y": 1}}


@pytest.mark.parametrize("override", ["trainer.train_steps", "trainer.train_steps=[1", "name.part=x"])
def test_an_override_or_a_variable_that_cannot_be_read_is_a_clear_error(run_file, override: str) -> None:
    with pytest.raises(ConfigError, match="ROLLMESH_TRAINER__TRAIN_STEPS"):
        load_run_config(run_file(), environ={"ROLLMESH_TRAINER__TRAIN_STEPS": "{"})
    with pytest.raises(ConfigError, match=re.escape(f"--set {override.partition('=')[0]}")):
        load_run_config(run_file(), [override], environ={})
    with pytest.raises(ConfigError, match="train_steps: .*set by --set trainer.train_steps"):
        load_run_config(run_file(), ["trainer.train_steps=few"], environ={})
    with pytest.raises(ConfigError, match="ROLLMESH_FOLDER"):
        load_run_config(run_file(), environ={"ROLLMESH_FOLDER": b"caf\xe9".decode("utf-8", "surrogateescape")})
    with pytest.raises(ConfigError, match="foo: unknown key.*set by the environment variable ROLLMESH_FOO"):
        load_run_config(run_file(), environ={"ROLLMESH_FOO": "1"})


@pytest.mark.parametrize("text", ["2024", "null", "a #2", "a: b", "[a", "\U0001f600", 'a "b" \\c'])
def test_a_text_override_keeps_what_yaml_would_read_otherwise(run_file, text: str) -> None:
    assert load_run_config(run_file(), [text_override("folder", text)], environ={}).folder == text


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"reward": {"options": {"prefix": "a\udc00"}}}, "reward.options.prefix: character 1 is half of a surrogate"),
        ({"data": {"chat_template_kwargs": {"x": ["\udc00"]}}}, "data.chat_template_kwargs.x.0: character 0 is half"),
        ({"rollout": {"environment_options": {"a\udc00": 1}}}, r"rollout.environment_options.'a\\udc00': in the name"),
    ],
)
def test_half_a_character_in_a_run_file_is_refused_by_its_field(run_file, sections, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load_run_config(run_file(**sections), environ={})


@pytest.mark.parametrize(
    ("url", "kept", "password"),
    [
        ("redis://:hunter2@host:6379/3", "redis://host:6379/3", "hunter2"),
        ("redis+sentinel://:hunter2@one:26380,two/queue", "redis+sentinel://one:26380,two/queue", "hunter2"),
        ("unix://:hunter2@/run/redis.sock?db=1", "unix:///run/redis.sock?db=1", "hunter2"),
        ("unix:///run/a:b@c.sock", "unix:///run/a:b@c.sock", None),
        ("redis://:hunter2/x@host:6379/0", "redis://host:6379/0", "hunter2/x"),
        ("redis://me:a/hunter2?#@y:z@[::1]:6379/1", "redis://me@[::1]:6379/1", "a/hunter2?#@y:z"),
        ("rediss+sentinel://:hunter2/x@[fd00::1]:1,b/queue", "rediss+sentinel://[fd00::1]:1,b/queue", "hunter2/x"),
        ("unix:///run/redis.sock?password=hunter2&db=1", "unix:///run/redis.sock?db=1", "hunter2"),
        ("redis://host/0?password=hunter2@home", "redis://host/0", "hunter2@home"),
    ],
)
def test_a_password_in_the_url_is_a_secret_like_any_other(run_file, tmp_path: Path, url, kept, password) -> None:
    assert parse_redis_url("redis+sentinel://[fd00::1]:1,[::2]/q").hosts == (("fd00::1", 1), ("::2", 26379))
    config = load_run_config(run_file(store={"url": url}), environ={})
    assert config.store.url == kept
    own = load_run_config(run_file(store={"url": url}), environ={"ROLLMESH_STORE__PASSWORD": "new"}).store.password
    assert own is not None and own.get_secret_value() == "new"
    assert password == (None if config.store.password is None else config.store.password.get_secret_value())
    write_run_config(config, tmp_path / "config.yaml")
    assert "hunter2" not in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://:hunter2@host?protocol=2", "the URL cannot set the option 'protocol'"),
        ("rediss://:hunter2@host?ssl_cert_reqs=", r"the URL cannot set the option 'ssl_cert_reqs'; set store\.tls"),
        ("rediss://:hunter2@host/0?db=1", "the database is given twice"),
        ("redis://:hunter2@host/first", "database 'first' is not a number"),
        ("redis://:hunter2@::1:6379", "is not host:port"),
        ("redis://:hunter2", "a password is followed by an @"),
        ("redis://:hunter2@host:70000", "a port from 1 to 65535"),
        ("redis+sentinel://:hunter2@host", r"host:port\[,host:port\]/service"),
        ("http://:hunter2@host", "must begin with one of redis://"),
        ("unix://:hunter2@redis.sock", "an absolute path"),
    ],
)
def test_a_url_that_cannot_be_used_as_written_is_an_error_of_its_field_without_the_password(
    run_file, url: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load_run_config(run_file(store={"url": url}), environ={})
    assert "store.url" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_agents_are_evaluated_where_the_file_says_so_and_a_top_k_of_minus_one_keeps_all_as_elsewhere() -> None:
    assert run_config("evaluation.top_k=-1").evaluation.top_k == 0
    assert not run_config("rollout.program=agent").evaluation.before_and_after
    assert run_config().evaluation.before_and_after
    assert run_config("rollout.program=agent evaluation.before_and_after=true").evaluation.before_and_after


def test_writers_that_share_a_process_number_do_not_meet(run_file, tmp_path: Path) -> None:
    """Pods that share the run folder: everybody is process 1 there."""
    config = load_run_config(run_file())
    target = tmp_path / "config.yaml"

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(lambda _: write_run_config(config, target), range(24)))

    assert load_run_config(target).name == config.name
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("network__host", "::", "::"),
        ("network__host", "12:30", "12:30"),
        ("network__host", '"::1"', "::1"),
        ("network__host", "null", None),
        ("network__host", "", None),
        ("network__instance", "true", "true"),
        ("network__advertise_host", "[::1]", "[::1]"),
        ("name", "2024", "2024"),
        ("name", "null", "null"),
        ("model__path", "models/a #1", "models/a #1"),
        ("model__path", "{a: b}", "{a: b}"),
        ("checkpoints__folder", "2024-01-01", "2024-01-01"),
        ("network__grpc_port", "017", 15),
        ("network__shared_folder", "false", False),
    ],
)
def test_a_field_of_text_takes_any_text_from_a_variable_and_an_option(
    run_file, variable: str, text: str, value: object
) -> None:
    keys = variable.split("__")
    for overrides, environ in (([], {f"ROLLMESH_{variable.upper()}": text}), ([f"{'.'.join(keys)}={text}"], {})):
        found = load_run_config(run_file(), overrides, environ)
        for key in keys:
            found = getattr(found, key)
        assert found == value


def test_a_field_of_text_needs_no_quotes_in_the_file_or_a_section_of_an_option_or_a_variable(
    run_file, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: 2024\nfolder: 1e5\nmodel: {path: 12:30}\nnetwork: {host: null, advertise_host: 10.0}\n")
    config = load_run_config(file, environ={})
    assert (config.name, config.folder, config.model.path) == ("2024", "1e5", "12:30")
    assert (config.network.host, config.network.advertise_host) == (None, "10.0")
    environ = {"ROLLMESH_NETWORK": "{host: 10.0, instance: 2024-01-01}"}
    config = load_run_config(run_file(), ["data.source={type: jsonl, path: 0123}"], environ)
    assert (config.network.host, config.network.instance) == ("10.0", "2024-01-01")
    assert config.data.source.table_path == "0123"


# Values of YAML 1.2 (section 10.3.2 of its specification, and the numbers that Helm writes).
NUMBERS = {
    "1e-7": 1e-7,
    "1e-07": 1e-7,
    "5E+3": 5000.0,
    "1.5e3": 1500.0,
    ".5": 0.5,
    "-.5e1": -5.0,
    "3.": 3.0,
    "-12": -12,
    "0x1F": 31,
    "12:30": "12:30",
    "2024-07-26": "2024-07-26",
    "1e": "1e",
    "e5": "e5",
    "1.2.3": "1.2.3",
    "2001-12-14t21:59:43.10-05:00": "2001-12-14t21:59:43.10-05:00",
    "'1e-7'": "1e-7",
}


def test_numbers_of_free_options_are_those_of_yaml_1_2_and_come_back_from_the_written_file(tmp_path: Path) -> None:
    lines = [f"      o{n}: {text}\n" for n, text in enumerate(NUMBERS)]
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: a\nfolder: r\nmodel: {path: m}\nrollout:\n  program: environment\n  environment: mine:World\n"
        f"  environment_options:\n{''.join(lines)}"
    )
    config = load_run_config(file, ["rollout.environment_options.set=1e-7"], environ={})
    expected = {f"o{n}": value for n, value in enumerate(NUMBERS.values())} | {"set": 1e-7}
    assert config.rollout.environment_options == expected
    write_run_config(config, tmp_path / "written.yaml")
    again = load_run_config(tmp_path / "written.yaml", environ={})
    assert again.rollout.environment_options == expected
    # Other readers, such as PyYAML itself, take 12:30 for 750 unless it is quoted.
    assert yaml.safe_load((tmp_path / "written.yaml").read_text())["rollout"]["environment_options"] == expected


@pytest.mark.parametrize("field", [".".join(path) for path in SECRETS])
@pytest.mark.parametrize("end", ["", "\r\n"])
def test_a_secret_is_taken_as_it_is_and_never_written_or_shown(run_file, tmp_path: Path, field: str, end: str) -> None:
    """A line break at its end is not part of it: editors and echo add one to a file."""
    environ = {f"ROLLMESH_{field.replace('.', '__').upper()}": f" 0123: [a secret/of @one line{end}"}
    config = load_run_config(run_file(), environ=environ)
    assert list(secret_environment(config).values()) == [" 0123: [a secret/of @one line"]
    written = tmp_path / "config.yaml"
    write_run_config(config, written)
    assert "secret/of" not in written.read_text() + repr(config)
    assert load_run_config(written, environ=environ) == config
    *sections, name = field.split(".")
    wrong: dict[str, Any] = {name: 424242}
    for section in reversed(sections[1:]):
        wrong = {section: wrong}
    with pytest.raises(ConfigError, match=field) as error:
        load_run_config(run_file(**{sections[0]: wrong}), environ={})
    assert "424242" not in str(error.value)


def test_all_three_files_turn_mutual_tls_on_and_a_missing_one_is_named(run_file) -> None:
    files = {"certificate": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    config = load_run_config(run_file(), environ={})
    assert not config.security.tls.enabled and config.security.token is None and not config.store.tls.configured
    assert load_run_config(run_file(security={"tls": files}), environ={}).security.tls.enabled
    for missing in files:
        some = {name: path for name, path in files.items() if name != missing}
        with pytest.raises(ConfigError, match=f"certificate, key and ca together; missing: {missing}"):
            load_run_config(run_file(security={"tls": some}), environ={})


def test_a_loss_without_dual_clip_takes_its_own_resolved_run_file(run_file, tmp_path: Path) -> None:
    config = load_run_config(run_file(trainer={"algorithm": {"loss": "cispo"}}), environ={})
    write_run_config(config, tmp_path / "resolved.yaml")
    assert "dual_clip" in (tmp_path / "resolved.yaml").read_text()
    assert load_run_config(tmp_path / "resolved.yaml", environ={}) == config
