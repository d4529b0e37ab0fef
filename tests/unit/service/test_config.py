"""Settings: sources, bounds, refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import encoder_service
from encoder_service.cli.serve import given_options, serve_command
from encoder_service.config import GROUPS, Settings, parse_settings
from encoder_service.errors import ConfigurationError


def test_arguments_win_over_the_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VE_DEVICE", "cuda:1")
    monkeypatch.setenv("VE_LISTEN", "0.0.0.0:1, unix:/run/x.sock")
    settings = parse_settings(model=Path("/m"), device="cpu", playground=None)
    assert settings.device == "cpu"
    assert settings.listen == ("0.0.0.0:1", "unix:/run/x.sock")
    assert settings.playground is False


def test_a_models_path_with_a_dot_stays_a_folders() -> None:
    """Otherwise ./ORG/NAME would be a hub id."""
    assert parse_settings(model="./a/b").model == Path("a/b").absolute()
    assert parse_settings(model="a/b").model == Path("a/b")


def test_every_setting_is_an_option_with_its_unit_bounds_and_default() -> None:
    options = {parameter.name: parameter for parameter in serve_command().params}
    assert options.pop("config").help.endswith("[VE_CONFIG]")
    assert list(options) == list(Settings.model_fields)
    assert all(str(field.description) in options[name].help for name, field in Settings.model_fields.items())
    for name, value, facts in (
        ("model", "path", "(required)"),
        ("max_message_bytes", "bytes", "(1048576 to 2147483647, default 268435456)"),
        ("arena_bytes", "bytes", "(at least 1048576, default 2147483648)"),
        ("device_arena_bytes", "bytes", "(at least 0)"),
        ("max_patches_per_item", "patches", "(at least 4, default 69632)"),
        ("drain_grace_s", "seconds", "(0 to 3600, default 20.0)"),
        ("max_calls", "number", "(1 to 1000000, default 4096)"),
        ("dtype", "auto|float32|bfloat16", "(default auto)"),
        ("listen", "value,...", "(default 127.0.0.1:50051)"),
        ("isolated_namespaces", "name=value,...", "comma separated."),
        ("reflection", None, "(default true)"),
    ):
        assert options[name].metavar == value
        assert options[name].help.endswith(f"{facts} [VE_{name.upper()}]")


def test_help_has_the_options_in_groups() -> None:
    command = serve_command()
    lines = command.get_help(command.make_context("serve", ["--model", "/m"])).splitlines()
    for option, title in (("--device", "Tower"), ("--playground", "Addresses"), ("--traces", "Operation")):
        number = next(number for number, line in enumerate(lines) if line.startswith(f"  {option} "))
        assert [line for line in lines[:number] if line.endswith(":")][-1] == f"{title}:"
    assert set(GROUPS.values()) <= set(Settings.model_fields)


def test_options_are_parsed_as_the_environment_is_and_win_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*words: str) -> Settings:
        options = serve_command().make_context("serve", list(words)).params
        return parse_settings(**given_options(options))

    monkeypatch.setenv("VE_MAX_CALLS", "7")
    monkeypatch.setenv("VE_TOKENS_FILE", "/tokens")
    assert parsed("--model", "/m").max_calls == 7
    settings = parsed(
        *("--model", "/m", "--max-calls", "8", "--no-reflection", "--playground", "--admin-listen", ""),
        *("--listen", "0.0.0.0:1", "--listen", "unix:/a, unix:/b", "--dtype", "bfloat16"),
        *("--broker-path", "/b", "--isolated-namespaces", "a=1048576", "--isolated-namespaces", "b=1048577"),
    )
    assert (settings.max_calls, settings.reflection, settings.playground) == (8, False, True)
    assert settings.admin_listen == ""
    assert settings.listen == ("0.0.0.0:1", "unix:/a", "unix:/b")
    assert settings.isolated_namespaces == {"a": (1 << 20,), "b": ((1 << 20) + 1,)}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "^--model is missing: a checkpoint's folder, or a hub id such as "),
        ({"device": "gpu"}, "^--device: 'gpu' is none of auto, cpu, cuda and cuda:N$"),
        ({"dtype": "half"}, "^--dtype is 'half', needs one of auto, float32, bfloat16$"),
        ({"attention": "fa9"}, "^--attention is 'fa9', needs one of auto, fa4, .*, varlen, sdpa$"),
        ({"max_calls": "0"}, "^--max-calls is '0', needs a whole number, 1 to 1000000$"),
        ({"drain_grace_s": "soon"}, "^--drain-grace-s is 'soon', needs a number of seconds, 0 to 3600$"),
        ({"arena_bytes": "2G"}, "^--arena-bytes is '2G', needs a whole number of bytes, at least 1048576$"),
        ({"reflection": "maybe"}, "^--reflection is 'maybe', needs true or false$"),
        ({"bucket_sizes": "a"}, "^--bucket-sizes is 'a', needs numbers in a comma list$"),
        ({"listen": ("50053",)}, "^--listen: '50053' is neither host:port nor unix:/path$"),
        ({"listen": ()}, "^--listen is empty, needs at least one value$"),
        ({"listen": ("unix:" + "x" * 200,)}, "at most 107 bytes"),
        ({"admin_listen": "unix:/x"}, "host:port only"),
        ({"sglang_receivers": ("localhost",)}, "^--sglang-receivers: 'localhost' is no network"),
        ({"sglang_register": ("http://a:1",), "sglang_url": "http://b:1"}, "needs serve_sglang"),
        ({"sglang_register": ("http://a:1",), "serve_sglang": "127.0.0.1:1"}, "and sglang_url"),
        ({"sglang_url": "ftp://a:1"}, "is not http://host:port"),
        ({"serve_tokenspeed": "host:1"}, "^serve_tokenspeed is 'host:1', needs IP:port$"),
        ({"serve_tokenspeed": "[::1]:1"}, "needs an IPv4 address, which prefill workers can use, not ::1"),
        ({"serve_tokenspeed": "0.0.0.0:1", "tokenspeed_rdma": "auto"}, "own address, not 0.0.0.0"),
        ({"tokenspeed_receivers": ("localhost",)}, "^--tokenspeed-receivers: 'localhost'"),
        ({"arena_byte": 1}, r"^arena_byte is no setting, did you mean arena_bytes\?$"),
        ({"max_queued_patches": 65_535}, "max_patches_per_item 69632 is above max_queued_patches 65535"),
        ({"max_queued_bytes": 1 << 20}, "max_message_bytes 268435456 is above max_queued_bytes 1048576"),
        ({"broker_path": "run/broker.sock"}, "'run/broker.sock' is no absolute path"),
        ({"broker_path": "/" + "n" * 107}, "at most 107 bytes"),
        ({"broker_path": "", "isolated_namespaces": "a=1048576"}, "set broker_path"),
        ({"broker_path": "/b", "isolated_namespaces": "a=1048576"}, "need tokens: set tokens_file"),
        (
            {"broker_path": "/b", "isolated_namespaces": "a=1048575", "tokens_file": "t"},
            "--isolated-namespaces: '1048575' is neither host bytes nor .*, at least 1048576 each",
        ),
        (
            {"broker_path": "/b", "isolated_namespaces": "a=1048576+1048576+1048576", "tokens_file": "t"},
            r"'1048576\+1048576\+1048576' is neither host bytes nor host bytes\+device bytes",
        ),
        ({"isolated_namespaces": "a=1048576,a=1048576"}, "'a' is not one name=value"),
        ({"broker_mode": "9"}, "^--broker-mode: '9' is no mode of three octal digits, such as 660$"),
        (
            {"broker_path": "/b", "device": "cpu", "device_arena_bytes": 2_097_152},
            "2097152 bytes of device arenas are a GPU's memory, device is cpu",
        ),
        ({"tls_cert": "c.pem"}, "tls_cert and tls_key are set together"),
        ({"admin_tls": True}, "admin_tls needs tls_cert"),
        ({"tls_client_ca": "c.pem"}, "tls_client_ca needs tls_cert"),
        ({"admin_token": ""}, "admin_token is empty"),
        ({"shm_prefixes": "ab"}, "shm_prefixes has 'ab'"),
        ({"url_networks": "10.0.0.1/8"}, "^--url-networks: '10.0.0.1/8' is no network such as 10.1.0.0/16"),
        (
            {"broker_path": "", "device_arena_bytes": 2_097_152},
            "device_arena_bytes is memory that a broker hands out",
        ),
        (
            {"device": "cpu", "isolated_namespaces": "a=1048576+1048576", "tokens_file": "t"},
            "1048576 bytes of device arenas are a GPU's memory, device is cpu",
        ),
        (
            {
                "broker_path": "/b",
                "isolated_namespaces": "a=1048576+1048576",
                "tokens_file": "t",
                "device": "cuda",
                "device_arena_bytes": 0,
            },
            "isolated_namespaces have device arenas, device_arena_bytes is 0",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(given: dict[str, object], text: str) -> None:
    arguments = {"model": Path("/m"), **given} if given else {}
    with pytest.raises(ConfigurationError, match=text):
        parse_settings(**arguments)


def test_names_and_values_come_as_a_comma_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VE_BROKER_PATH", "/run/broker.sock")
    monkeypatch.setenv("VE_ISOLATED_NAMESPACES", "a=1048576, =2097152+1048576")
    monkeypatch.setenv("VE_TOKENS_FILE", "/tokens")
    monkeypatch.setenv("VE_BROKER_ALLOWED_UIDS", "0, 1000")
    settings = parse_settings(model=Path("/m"), device="cuda")
    assert settings.isolated_namespaces == {"a": (1 << 20,), "": (2 << 20, 1 << 20)}
    assert settings.broker_allowed_uids == (0, 1000)


def test_the_token_is_in_no_text() -> None:
    assert "hush" not in repr(parse_settings(model=Path("/m"), admin_token="hush"))
    with pytest.raises(ConfigurationError, match="--admin-token needs text") as refused:
        parse_settings(model=Path("/m"), admin_token=["hush"])
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("name", ["VE_AERNA_BYTES", "ve_arena_bytes"])
def test_unknown_environment_variables_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are case-sensitive, as those of a shell."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigurationError, match=f"{name} is no setting, did you mean VE_ARENA_BYTES"):
        parse_settings(model=Path("/m"))


def test_a_file_goes_below_the_environment_and_that_below_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "encoder.yaml"
    file.write_text(
        "model: /file\nmax-calls: 3\nmax_connections: 3\nreflection: false\ndrain_grace_s: 3\n"
        "listen: [127.0.0.1:3, unix:/a]\nbucket_sizes: 1024\n"
        "tokens_file: /t\nisolated_namespaces: {a: 1048576, b: 1048576+1048576}\n"
    )
    monkeypatch.setenv("VE_CONFIG", str(file))
    monkeypatch.setenv("VE_MAX_CALLS", "2")
    monkeypatch.setenv("VE_MAX_CONNECTIONS", "2")
    settings = parse_settings(max_calls="1")
    assert (settings.max_calls, settings.max_connections, settings.drain_grace_s) == (1, 2, 3)
    assert (settings.model, settings.reflection) == (Path("/file"), False)
    assert settings.listen == ("127.0.0.1:3", "unix:/a")
    assert settings.bucket_sizes == (1024,)
    assert settings.isolated_namespaces == {"a": (1 << 20,), "b": (1 << 20, 1 << 20)}
    other = tmp_path / "other.yaml"
    other.write_text("model: /other")
    assert parse_settings(config=other).model == Path("/other")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: /m\ndevcie: cpu", r"^FILE: devcie is no setting, did you mean device\?$"),
        ("model: /m\nmax_calls: many", "^FILE: max_calls is 'many', needs a whole number, 1 to 1000000$"),
        ("model: /m\nlisten: 50053", "^FILE: listen: '50053' is neither host:port nor unix:/path$"),
        ("model: /m\nbroker_mode: 0660", "^FILE: broker_mode is 432, needs text in quotes$"),
        ("model: [", "^--config FILE, line 1 is not YAML: "),
        ("model: /m\nadmin_listen:", "^FILE: admin_listen has no value: write '' for none, or leave"),
        ("model: /m\nmax-calls: 5\nmax_calls: 7", "^--config FILE has several lines of max_calls$"),
        ("- model", "^--config FILE holds a list, needs lines of name: value$"),
        (None, "^--config FILE cannot be read: No such file or directory$"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "encoder.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=message.replace("FILE", re.escape(str(file)))):
        parse_settings(config=file)


def test_errors_name_the_variable_and_all_problems_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VE_MAX_CALLS", "0")
    with pytest.raises(ConfigurationError) as refused:
        parse_settings(model="/m", listen=("1", "2"), device="gpu")
    texts = sorted(text.partition(" ")[0] for text in refused.value.message.split("; "))
    assert texts == ["--device:", "--listen:", "VE_MAX_CALLS"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--model is missing"),
        (("--model", "/no/such/folder"), "--model is /no/such/folder: there is no such folder"),
        (("--model", "."), "has no config.json"),
        (
            ("--model", "MODEL", "--tokens-file", "/no/tokens"),
            "--tokens-file: cannot read /no/tokens",
        ),
        (("--model", "MODEL", "--tls-cert", "/no/c", "--tls-key", "/no/k"), "--tls-cert: cannot read /no/c"),
    ],
)
def test_a_wrong_setting_is_answered_before_torch_is_imported(
    tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    """The import takes seconds."""
    (tmp_path / "config.json").write_text("{}")
    words = [word.replace("MODEL", str(tmp_path)) for word in arguments]
    code = "import sys; sys.modules['torch'] = None; from encoder_service.cli import app; "
    code += f"app(['serve', *{words}])"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "..", capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("vision-encoder: cannot start: ")
    assert text in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_shell_completes_the_options_of_serve_and_shows_the_version() -> None:
    def words(*arguments: str, **variables: str) -> list[str]:
        code = "from encoder_service.cli import app; app(prog_name='vision-encoder')"
        ended = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **variables}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return ended.stdout.split()

    asked = {"_VISION_ENCODER_COMPLETE": "complete_bash", "COMP_WORDS": "vision-encoder serve --dev"}
    assert words(COMP_CWORD="2", **asked) == ["--device", "--device-arena-bytes"]
    assert words("--version") == ["vision-encoder", encoder_service.__version__]
