from pathlib import Path

import pytest

from dflash_train.config import ConfigError, DrafterConfig, LossConfig, default_tap_layers
from dflash_train.config_files import dump_config, load_config, parse_config, presets


@pytest.mark.parametrize(
    ("num_layers", "taps"),
    [
        (36, (1, 9, 17, 25, 33)),
        (32, (1, 8, 15, 22, 29)),
        (40, (1, 10, 19, 28, 37)),
        (64, (1, 16, 31, 46, 61)),
        (18, (1, 4, 8, 12, 15)),  # 4.5 and 11.5: ties go to even
    ],
)
def test_tap_layers_are_the_published_ones(num_layers: int, taps: tuple[int, ...]) -> None:
    assert default_tap_layers(num_layers, 5) == taps


def test_one_tap_is_the_middle_layer() -> None:
    assert default_tap_layers(36, 1) == (18,)


@pytest.mark.parametrize(("num_layers", "num_taps"), [(4, 2), (6, 5), (1, 2), (3, 2), (36, 0)])
def test_a_target_too_shallow_for_its_taps_is_refused(num_layers: int, num_taps: int) -> None:
    with pytest.raises(ConfigError, match="num_taps"):
        default_tap_layers(num_layers, num_taps)


@pytest.mark.parametrize("name", presets())
def test_a_preset_reads_back_from_its_own_dump(name: str) -> None:
    config = load_config(name)
    assert parse_config(dump_config(config)) == config


def test_presets_are_the_promised_four() -> None:
    assert presets() == ["gemma3-270m", "qwen3-8b", "qwen3.6-27b", "tiny-cpu"]


def test_qwen3_preset_has_the_published_shape() -> None:
    drafter = load_config("qwen3-8b").drafter
    assert (drafter.taps, drafter.block_size, drafter.mask_token_id) == ((1, 9, 17, 25, 33), 16, 151669)
    assert (drafter.rope_theta, drafter.layers) == (1e6, ("full_attention",) * 5)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[drafter]\nblok_size = 3", (), "f.toml:2: unknown key drafter.blok_size; did you mean block_size?"),
        ("[draftr]\nblock_size = 3", (), "f.toml:1: unknown key draftr; did you mean drafter?"),
        ("[loss]\n\nce = 'x'", (), "f.toml:3: loss.ce must be a number, got 'x'"),
        ("[drafter]\nblock_size = 1", (), "f.toml:2: drafter.block_size must be at least 2"),
        ("[drafter]\nblock_size = true", (), "f.toml:2: drafter.block_size must be a whole number, got True"),
        ("[drafter]\nnum_heads = 6\nnum_kv_heads = 4", (), "must divide drafter.num_heads = 6, got 4"),
        (
            "",
            ("drafter.blck_size=8",),
            "--set drafter.blck_size=8: unknown key drafter.blck_size; did you mean block_size",
        ),
        ("", ("block_size",), "--set takes section.field=value, got 'block_size'"),
        ("", ("loss.weighting=dpaec",), "must be one of decay, dpace, uniform, got 'dpaec'"),
        ("drafter = 3", (), "f.toml:1: drafter must be a section [drafter], got 3"),
        ("[drafter", (), "f.toml is not TOML"),
        (
            "",
            ("drafter.layer_types=['sliding_attention']", "drafter.num_layers=1"),
            "drafter.sliding_window must be at least 1",
        ),
        ("", ("drafter.target_layer_ids=[3,36]",), "0-based output of a layer), got [36]"),
        ("", ("loss.ce=0",), "nothing would be learnt"),
    ],
)
def test_a_bad_setting_names_its_value_place_and_next_step(text: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.toml", overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value).replace("\\n", "")


def test_overrides_apply_in_order_and_bare_words_need_no_quotes() -> None:
    config = parse_config(
        "", overrides=["target.path=models/a", "loss.ce=2", "loss.ce=3", "drafter.target_layer_ids=[1, 5]"]
    )
    assert (config.target.path, config.loss.ce, config.drafter.taps) == ("models/a", 3.0, (1, 5))


def test_a_missing_file_names_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a preset \(gemma3-270m, .* nor a readable file"):
        load_config(tmp_path / "no.toml")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "c.toml")


def test_sample_from_anchor_is_off_unless_asked_and_changes_the_number_of_drafts() -> None:
    assert DrafterConfig(block_size=8).num_draft_tokens == 7
    assert DrafterConfig(block_size=8, sample_from_anchor=True).num_draft_tokens == 8


def test_infinite_loss_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss\.kl must be 0 or more and finite, got inf"):
        LossConfig(kl=float("inf"))
