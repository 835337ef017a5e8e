"""Hub ids: found in the cache when offline, as links into its blobs; else one clear line."""

import huggingface_hub
import pytest
import tiny
from huggingface_hub import constants

from peagle_jax import weights
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.checkpoints.target_io import load_target, read_facts, save_target
from peagle_jax.cli import main
from peagle_jax.types import InputError

HEAD, TARGET = "amazon/Tiny-P-EAGLE", "amazon/tiny-target"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """What snapshot_download leaves behind: snapshots of links into blobs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    save_target(tiny.target(), tmp_path / "target")
    save_drafter(tiny.head(), tmp_path / "head", max_shard_bytes=8000)
    for name, folder in ((HEAD, tmp_path / "head"), (TARGET, tmp_path / "target")):
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / REVISION
        for place in (snapshot, repository / "blobs", repository / "refs"):
            place.mkdir(parents=True)
        for i, file in enumerate(sorted(folder.iterdir())):
            file.rename(repository / "blobs" / f"blob{i}")
            (snapshot / file.name).symlink_to(f"../../blobs/blob{i}")
        (repository / "refs" / "main").write_text(REVISION)
    return tmp_path


def test_a_repository_that_has_only_pickles(cache):
    """They are not fetched, and so not found; what to do is said all the same."""
    snapshot = cache / "hub" / "models--amazon--tiny-target" / "snapshots" / REVISION
    for file in snapshot.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(InputError, match="got neither; if the repository has only pickles"):
        load_target(TARGET)


def test_wherever_a_folder_is_read(cache, capsys):
    head, target = load_drafter(HEAD), load_target(TARGET)
    assert head.config == tiny.head_config() and target.config.vocab == 41
    assert load_drafter(f"{HEAD}@{REVISION}").config == head.config
    out = cache / "out"
    for words in (
        ["inspect", HEAD],
        ["serve-config", HEAD, "--engine", "vllm"],
        ["inspect", TARGET],
        ["convert", HEAD, str(out), "--to", "speculators", "--target", TARGET],
        [
            "generate",
            "--target",
            TARGET,
            "--drafter",
            HEAD,
            "--prompts",
            str(cache / "prompts.jsonl"),
            "--max-new-tokens",
            "4",
        ],
    ):
        (cache / "prompts.jsonl").write_text('{"prompt_token_ids": [3, 4]}\n')
        assert main(words) == 0, words
    assert f'"model": "{HEAD}"' in capsys.readouterr().out
    verifier = weights.read_json(out / "config.json")["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": TARGET, "architectures": ["Qwen3ForCausalLM"]}
    assert weights.read_metadata(out)["source"] == HEAD
    assert main(["serve-config", f"{HEAD}@{REVISION}", "--engine", "vllm"]) == 0
    assert f'"model": "{HEAD}", "revision": "{REVISION}"' in capsys.readouterr().out


def test_a_targets_config_is_all_that_is_fetched_of_it(monkeypatch, tmp_path):
    downloads = []
    save_target(tiny.target(), tmp_path / "t")

    def snapshot_download(name, **options):
        downloads.append((name, options))
        return str(tmp_path / "t")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert read_facts("owner/name@rev").layers == 4
    name, options = downloads[0]
    assert name == "owner/name" and options["revision"] == "rev"
    assert options["allow_patterns"] == ["config.json"]


@pytest.mark.parametrize("name", ["x" * 300, "owner/" + "y" * 300])
def test_names_that_no_file_can_have(name):
    with pytest.raises(InputError, match="must (be readable|be a local folder)"):
        weights.find_folder(name)


@pytest.mark.parametrize(
    "name",
    [
        "amazon/GPT-OSS-20B-P-EAGLE",
        "amazon/Tiny-P-EAGLE@other",
        "nobody/no-such-model",
        "no/my model",
        "nowhere",
        "/not/here",
    ],
)
def test_what_is_not_there(name, cache):
    with pytest.raises(
        InputError, match="must (exist|be a local folder, or a hub id that is online or cached)"
    ) as error:
        weights.find_folder(name)
    assert name in str(error.value)


def test_a_snapshot_that_was_not_fetched_whole(cache):
    snapshot = cache / "hub" / "models--amazon--Tiny-P-EAGLE" / "snapshots" / REVISION
    next(snapshot.glob("model-00002*")).unlink()
    with pytest.raises(
        InputError, match="model-00002.*must exist; got nothing; download model-00002"
    ):
        load_drafter(HEAD)


def test_a_link_from_one_repository_into_another(cache):
    snapshot = cache / "hub" / "models--amazon--Tiny-P-EAGLE" / "snapshots" / REVISION
    shard = next(snapshot.glob("model-00002*"))
    shard.unlink()
    shard.symlink_to(cache / "hub" / "models--amazon--tiny-target" / "blobs" / "blob1")
    with pytest.raises(InputError, match="a link to elsewhere"):
        load_drafter(HEAD)
