"""How parameters are grouped: every way, for every kind of model, and every mistake."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from newton_summary import Partition, make_partition
from newton_summary.partition import PARTITIONS, Layer, find_layers, role

# --- models --------------------------------------------------------------------------------------


def vgg():
    """Like VGG-11': 8 convolutions and a linear layer."""
    convolutions = [module for _ in range(8) for module in (nn.Conv2d(2, 2, 3), nn.ELU())]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(2, 3))


def deep_mlp(layers):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))


class GPT(nn.Module):
    """Pre-norm blocks, embeddings, a bare parameter, and a head tied to the embedding."""

    def __init__(self, tied=True):
        super().__init__()
        self.wte = nn.Embedding(5, 4)
        self.position = nn.Parameter(torch.zeros(3, 4))
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.ln_f = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.wte.weight


def names(model):
    return [n for n, p in model.named_parameters() if p.requires_grad]


def groups_of(partition):
    return {
        name: [member.name for member in members]
        for name, members in zip(partition.names, partition.members, strict=True)
    }


# --- the partitions of Appendix J ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "S"),
    [
        ("trivial", 1),
        ("weights-biases", 2),
        ("blocks-2", 6),
        ("alternate-2", 6),
        ("blocks-4", 10),
        ("alternate-4", 10),
        ("canonical", 18),
    ],
)
def test_sizes_of_the_paper(spec, S):
    """App. J, VGG-11': S = 1, 2, 2k + 2, and the number of tensors."""
    assert len(make_partition(vgg(), spec)) == S


def weights(*layers):
    return [f"{2 * i}.weight" for i in layers]


def biases(*layers):
    return [f"{2 * i}.bias" for i in layers]


LAST = {"17.weight": ["17.weight"], "17.bias": ["17.bias"]}


def test_blocks_are_consecutive():
    """'the sequence of convolutional layers is split into k consecutive blocks'."""
    assert (
        groups_of(make_partition(vgg(), "blocks-2"))
        == {
            "block0.weights": weights(0, 1, 2, 3),
            "block0.biases": biases(0, 1, 2, 3),
            "block1.weights": weights(4, 5, 6, 7),
            "block1.biases": biases(4, 5, 6, 7),
        }
        | LAST
    )


def test_alternate_takes_the_layer_number_modulo_k():
    """'the convolutional layer l is put in the s-block if l % k = s'."""
    assert (
        groups_of(make_partition(vgg(), "alternate-3"))
        == {
            "alternate0.weights": weights(0, 3, 6),
            "alternate0.biases": biases(0, 3, 6),
            "alternate1.weights": weights(1, 4, 7),
            "alternate1.biases": biases(1, 4, 7),
            "alternate2.weights": weights(2, 5),
            "alternate2.biases": biases(2, 5),
        }
        | LAST
    )


def test_uneven_blocks_differ_by_one_layer():
    partition = make_partition(vgg(), "blocks-3")
    assert [len(members) for members in partition.members] == [3, 3, 3, 3, 2, 2, 1, 1]


def test_weights_biases_trivial_and_canonical():
    model = vgg()
    everything = make_partition(model, "trivial")
    assert groups_of(everything) == {"all": names(model)}
    assert everything.roles == ("mixed",)
    two = make_partition(model, "weights-biases")
    assert groups_of(two) == {
        "weights": [*weights(*range(8)), "17.weight"],
        "biases": [*biases(*range(8)), "17.bias"],
    }
    assert two.roles == ("weight", "bias")
    assert groups_of(make_partition(model)) == {name: [name] for name in names(model)}


def test_five_chunks_of_vbigmlp():
    """App. H: 'we split the sequence of layers of VBigMLP into 5 chunks', S = 10."""
    partition = make_partition(deep_mlp(23), "chunks-5")
    assert len(partition) == 10
    assert partition.names[:2] == ("chunk0.weights", "chunk0.biases")
    assert [len(members) for members in partition.members] == [5, 5, 5, 5, 5, 5, 4, 4, 4, 4]
    assert sum(partition.sizes) == 23 * 6


def test_discrete_has_one_group_for_each_number():
    model = nn.Sequential(nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.tensor(1.0))
    partition = make_partition(model, "discrete")
    assert partition.names == (
        "scale",
        "0.weight[0,0]",
        "0.weight[0,1]",
        "0.weight[1,0]",
        "0.weight[1,1]",
        "0.bias[0]",
        "0.bias[1]",
    )
    assert partition.sizes == (1,) * 7
    assert partition.labels["scale"] == 0
    assert partition.labels["0.weight"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "spec", [s.replace("-k", "-1" if s == "modules-k" else "-2") for s in PARTITIONS]
)
@pytest.mark.parametrize("make", [vgg, GPT, lambda: deep_mlp(4)], ids=["vgg", "gpt", "mlp"])
def test_every_number_is_in_one_group(make, spec):
    model = make()
    partition = make_partition(model, spec)
    counted = torch.zeros(len(partition), dtype=torch.long)
    for name, label in partition.labels.items():
        label = torch.full(partition.params[name].shape, label) if isinstance(label, int) else label
        counted += torch.bincount(label.flatten(), minlength=len(partition))
    assert tuple(counted.tolist()) == partition.sizes
    assert sum(partition.sizes) == sum(p.numel() for p in set(model.parameters()))
    assert min(partition.sizes) > 0
    assert len(set(partition.names)) == len(partition)


# --- layers and roles ----------------------------------------------------------------------------


def test_roles_are_told_by_the_name():
    assert [role(name) for name in ("bias", "a.in_proj_bias", "lstm.bias_hh_l0_reverse")] == [
        "bias",
        "bias",
        "bias",
    ]
    for name in ("weight", "norm.weight", "wte.weight", "cls_token", "a.in_proj_weight", "scale"):
        assert role(name) == "weight"
    assert role("biased_net.weight") == "weight"  # the parameter's own name counts
    assert role("biases.3") == "bias"
    assert role("weights.3") == "weight"
    assert role("0.parametrizations.weight.original0") == "weight"
    assert role("0.parametrizations.bias.original") == "bias"
    assert role("parametrizations.bias.original") == "bias"


def test_layers_of_a_sequence():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    assert find_layers(model) == [
        Layer("0", ("0.weight",), ("0.bias",)),
        Layer("2", ("2.weight",), ()),
    ]


def test_a_norm_belongs_to_the_layer_before():
    model = nn.Sequential(
        nn.Conv1d(1, 2, 3),
        nn.BatchNorm1d(2),
        nn.Conv1d(2, 2, 3),
        nn.GroupNorm(1, 2),
        nn.Linear(2, 2),
    )
    assert find_layers(model) == [
        Layer("0", ("0.weight", "1.weight"), ("0.bias", "1.bias")),
        Layer("2", ("2.weight", "3.weight"), ("2.bias", "3.bias")),
        Layer("4", ("4.weight",), ("4.bias",)),
    ]
    assert len(make_partition(model, "blocks-2")) == 6


def test_a_norm_that_comes_first_belongs_to_the_layer_after():
    model = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 1))
    first, last = find_layers(model)
    assert first == Layer("1", ("0.weight", "1.weight"), ("0.bias", "1.bias"))
    assert last == Layer("2", ("2.weight",), ("2.bias",))


class Graph(nn.Module):
    """Layers in one list and norms in another, as is usual for graph networks."""

    def __init__(self, container):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.convs = container(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3))
        self.norms = container(nn.LayerNorm(2) for _ in range(2))
        self.head = nn.Linear(2, 1)


def named(modules):
    return nn.ModuleDict({f"block {i}": module for i, module in enumerate(modules)})


@pytest.mark.parametrize("container", [nn.ModuleList, named])
def test_a_norm_in_a_list_beside_the_layers_belongs_to_the_one_at_its_place(container):
    layers = find_layers(Graph(container))
    assert [len(layer.weights) for layer in layers] == [1, 1, 2, 1, 2, 1, 1, 1]
    for i, layer in enumerate((layers[2], layers[4])):
        place, linear = layer.name.split(".")[1:]
        assert linear == "1"
        assert layer.weights == (f"convs.{place}.1.weight", f"norms.{place}.weight")
        assert place in (str(i), f"block {i}")


@pytest.mark.parametrize("widths", [(3, 2, 2), (2, 2, 3), (2, 2, 2)])
def test_a_norm_in_a_list_belongs_to_the_list_of_layers_that_has_as_many(widths):
    """Not to embeddings that stand at the same place, unless these are as many."""
    embeddings, norms, layers = widths
    model = nn.ModuleDict(
        {
            "embeddings": nn.ModuleList(nn.Embedding(3, 2) for _ in range(embeddings)),
            "norms": nn.ModuleList(nn.LayerNorm(2) for _ in range(norms)),
            "layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(layers)),
        }
    )
    owner = "embeddings" if embeddings == norms else "layers"
    found = {w: layer.name for layer in find_layers(model) for w in layer.weights}
    assert [found[f"norms.{i}.weight"] for i in range(norms)] == [f"{owner}.0", f"{owner}.1"]


def test_a_single_norm_in_a_list_belongs_to_the_layer_before():
    """It stands at no layer's place: the norm at the end, and one of a list of stages."""
    model = nn.Module()
    model.embeds = nn.ModuleList([nn.Embedding(3, 2), nn.Embedding(4, 2)])
    model.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.norms = nn.ModuleList([nn.LayerNorm(2)])
    model.head = nn.Linear(2, 1)
    assert find_layers(model)[3].weights == ("blocks.1.weight", "norms.0.weight")
    convs = [[nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1)], [nn.BatchNorm2d(2)], [nn.Conv2d(2, 2, 1)]]
    stages = nn.ModuleList(map(nn.ModuleList, convs))
    assert find_layers(stages)[1].weights == ("0.1.weight", "1.0.weight")


def test_lists_that_are_run_as_a_whole_are_not_beside_each_other():
    """The norm at the end is after the last layer, not after the first."""
    stem, end = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.LayerNorm(2))
    layers = find_layers(nn.ModuleDict({"stem": stem, "body": nn.Linear(2, 2), "end": end}))
    assert layers[1].weights == ("body.weight", "end.0.weight")


def test_a_model_of_norms_alone_has_layers_too():
    model = nn.Sequential(nn.LayerNorm(2), nn.LayerNorm(2))
    assert len(find_layers(model)) == 2
    assert len(make_partition(model, "blocks-1")) == 4


def test_layers_of_a_transformer():
    """A norm belongs to the layer of its own block; embeddings and bare parameters are layers."""
    layers = find_layers(GPT())
    assert [layer.weights for layer in layers] == [
        ("position",),
        ("wte.weight",),
        ("blocks.0.ln_1.weight", "blocks.0.attn.in_proj_weight"),
        ("blocks.0.attn.out_proj.weight", "blocks.0.ln_2.weight"),
        ("blocks.0.mlp.0.weight",),
        ("blocks.0.mlp.2.weight",),
        ("blocks.1.ln_1.weight", "blocks.1.attn.in_proj_weight"),
        ("blocks.1.attn.out_proj.weight", "blocks.1.ln_2.weight"),
        ("blocks.1.mlp.0.weight",),
        ("blocks.1.mlp.2.weight", "ln_f.weight"),
    ]
    assert layers[2].biases == ("blocks.0.ln_1.bias", "blocks.0.attn.in_proj_bias")
    assert layers[0].biases == layers[1].biases == ()
    untied = find_layers(GPT(tied=False))
    assert untied[-1] == Layer("head", ("head.weight",), ())


def test_one_group_for_each_layer():
    model = nn.Sequential(
        nn.Conv1d(1, 2, 3),
        nn.BatchNorm1d(2),
        nn.ReLU(),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    )
    assert groups_of(make_partition(model, "layers")) == {
        "0": ["0.weight", "0.bias", "1.weight", "1.bias"],
        "3": ["3.bias", *(f"3.parametrizations.weight.original{i}" for i in range(2))],
    }
    alone = make_partition(nn.Linear(2, 1), "layers")
    assert groups_of(alone) == {"Linear": ["weight", "bias"]}
    assert make_partition(GPT(), "layers").names == (
        "position",
        "wte",
        *(
            f"blocks.{i}.{name}"
            for i in range(2)
            for name in ("attn", "attn.out_proj", "mlp.0", "mlp.2")
        ),
    )


def test_one_group_for_each_block_of_a_transformer():
    """Parameters above the depth asked for are grouped by their own module."""
    partition = make_partition(GPT(), "modules-2")
    assert partition.names == ("position", "wte", "blocks.0", "blocks.1", "ln_f")
    for name, members in groups_of(partition).items():
        assert name in ("position", "wte") or all(
            member.startswith(f"{name}.") for member in members
        )
    assert partition.titles[2:4] == ("blocks.0 (Block)", "blocks.1 (Block)")
    assert make_partition(GPT(), "modules-1").names == ("position", "wte", "blocks", "ln_f")
    finest = make_partition(GPT(), "modules-4")
    assert "blocks.0.attn" in finest.names and "blocks.0.attn.out_proj" in finest.names
    with pytest.raises(ValueError, match=r"at most 4 levels deep. Use a number from 1 to 4"):
        make_partition(GPT(), "modules-5")
    with pytest.raises(ValueError, match="no modules inside"):
        make_partition(nn.Linear(2, 1), "modules-1")


def test_a_model_and_its_child_of_the_same_name_are_two_groups():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = (nn.Parameter(torch.ones(1)) for _ in range(2))
            self.Linear = nn.Linear(2, 2)

    expected = {"Linear()": ["scale", "shift"], "Linear": ["Linear.weight", "Linear.bias"]}
    assert groups_of(make_partition(Linear(), "layers")) == expected
    assert groups_of(make_partition(Linear(), "modules-1")) == expected


@pytest.mark.parametrize("spec", ["blocks-2", "alternate-2"])
def test_a_tied_head_is_the_last_layer(spec):
    """Listed as the embedding that it shares its weight with, it stands alone all the same."""
    tied, untied = make_partition(GPT(), spec), make_partition(GPT(tied=False), spec)
    assert tied.names[-1] == "wte.weight" and untied.names[-1] == "head.weight"
    assert groups_of(tied)["wte.weight"] == ["wte.weight"]


def test_a_tied_layer_with_a_bias_of_its_own_is_the_last_layer():
    """An autoencoder that uses one matrix twice: the bias of the decoder is its own."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    assert make_partition(model, "blocks-1").names == ("block0.weights", "block0.biases", "2.bias")
    model[2].bias = model[1].bias  # nothing of its own: that of its weight
    assert make_partition(model, "blocks-1").names[-2:] == ("0.weight", "0.bias")


def test_titles_name_the_type_of_numbered_modules():
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.ModuleDict({"head": nn.Linear(2, 2)}))
    partition = make_partition(model)
    expected = ("0.weight (Conv2d)", "0.bias (Conv2d)", "1.head.weight", "1.head.bias")
    assert partition.titles == expected
    assert partition.names == ("0.weight", "0.bias", "1.head.weight", "1.head.bias")
    norm = nn.utils.parametrizations.weight_norm
    wrapped = make_partition(nn.Sequential(norm(nn.Linear(2, 2))), "layers")
    assert wrapped.titles == ("0 (Linear)",)
    mine = make_partition(model, {"first": r"^0\.", "rest": ...})
    assert mine.titles == mine.names
    read = Partition.from_state_dict(partition.state_dict())
    assert read.titles == expected and read.layers == partition.layers == (0, 0, 1, 1)


def test_a_partition_of_an_old_file_has_no_types():
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Linear(2, 1))
    state = make_partition(model).state_dict()
    del state["types"]
    old = Partition.from_state_dict(state)
    assert old.titles == old.names
    assert old.layers == (0, 0, 1, 1, 2, 2)  # a norm is not known to be one
    assert make_partition(model).layers == (0, 0, 0, 0, 1, 1)


def test_norms_of_other_libraries_are_known_by_their_name():
    class LlamaRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    class NormalisedLinear(nn.Linear):
        """Called after a norm, and none: it has a matrix."""

    model = nn.Sequential(nn.Linear(3, 3), LlamaRMSNorm(), NormalisedLinear(3, 3))
    assert find_layers(model) == [
        Layer("0", ("0.weight", "1.weight"), ("0.bias",)),
        Layer("2", ("2.weight",), ("2.bias",)),
    ]


def test_weight_and_bias_of_a_layer_are_in_the_same_block():
    """Also where layers have no bias, which counting tensors would get wrong."""
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False),
        nn.Linear(2, 2),
        nn.Linear(2, 2, bias=False),
        nn.Linear(2, 2),
        nn.Linear(2, 2),
    )
    assert groups_of(make_partition(model, "blocks-2")) == {
        "block0.weights": ["0.weight", "1.weight"],
        "block0.biases": ["1.bias"],
        "block1.weights": ["2.weight", "3.weight"],
        "block1.biases": ["3.bias"],
        "4.weight": ["4.weight"],
        "4.bias": ["4.bias"],
    }


def test_models_without_any_bias():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    assert groups_of(make_partition(model, "weights-biases")) == {"weights": names(model)}
    assert list(groups_of(make_partition(model, "blocks-2"))) == [
        "block0.weights",
        "block1.weights",
        "2.weight",
    ]
    assert len(make_partition(model, "chunks-3")) == 3


def test_recurrent_networks():
    model = nn.Sequential(nn.LSTM(2, 3, num_layers=2), nn.Linear(3, 1))
    assert find_layers(model)[0] == Layer(
        "0",
        ("0.weight_ih_l0", "0.weight_hh_l0", "0.weight_ih_l1", "0.weight_hh_l1"),
        ("0.bias_ih_l0", "0.bias_hh_l0", "0.bias_ih_l1", "0.bias_hh_l1"),
    )
    partition = make_partition(model, "blocks-1")
    assert partition.roles == ("weight", "bias", "weight", "bias")


def test_parametrisations_are_seen_through():
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(2, 3)), nn.Linear(3, 1))
    layer = Layer(
        "0",
        ("0.parametrizations.weight.original0", "0.parametrizations.weight.original1"),
        ("0.bias",),
    )
    assert {frozenset(found.weights) for found in find_layers(model)} == {
        frozenset(layer.weights),
        frozenset({"1.weight"}),
    }
    assert find_layers(model)[0].biases == ("0.bias",)
    alone = norm(nn.Linear(2, 3))
    assert len(find_layers(alone)) == 1
    assert len(make_partition(alone)) == 3
    assert make_partition(alone, "weights-biases").roles == ("weight", "bias")


def test_parameter_lists_are_layers_by_their_place():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(2, 2)) for _ in range(3)])
            self.biases = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])
            self.extra = nn.ParameterDict({"bias": nn.Parameter(torch.ones(2))})

    assert find_layers(Lists()) == [
        *(Layer(f"[{i}]", (f"weights.{i}",), (f"biases.{i}",)) for i in range(3)),
        Layer("[bias]", (), ("extra.bias",)),
    ]


def test_complex_names_and_scalars():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("a-b (c)*", nn.Parameter(torch.tensor(2.0)))
            self.inner = nn.ModuleDict({"key with space": nn.Linear(1, 1)})

    model = Odd()
    partition = make_partition(model)
    assert partition.names == (
        "a-b (c)*",
        "inner.key with space.weight",
        "inner.key with space.bias",
    )
    assert partition.sizes == (1, 1, 1)
    chosen = make_partition(model, {"odd": re.escape("a-b (c)*"), "rest": ...})
    assert groups_of(chosen)["odd"] == ["a-b (c)*"]


def test_frozen_parameters_are_left_out():
    model = deep_mlp(3)
    model[0].weight.requires_grad_(False)
    model[1].requires_grad_(False)
    assert make_partition(model).names == ("0.bias", "2.weight", "2.bias")
    assert len(find_layers(model)) == 2


def test_wrappers_of_data_parallelism_are_looked_through():
    model = deep_mlp(2)
    assert make_partition(nn.DataParallel(model)).names == make_partition(model).names


# --- mappings and lists --------------------------------------------------------------------------


def test_patterns_are_searched_and_the_rest_is_taken():
    partition = make_partition(
        GPT(), {"attention": r"\.attn\.", "mlp": re.compile(r"\.mlp\."), "rest": ...}
    )
    groups = groups_of(partition)
    assert partition.names == ("attention", "mlp", "rest")
    assert all(".attn." in name for name in groups["attention"]) and len(groups["attention"]) == 8
    assert all(".mlp." in name for name in groups["mlp"]) and len(groups["mlp"]) == 8
    assert groups["rest"][:2] == ["position", "wte.weight"]


def test_a_mapping_may_hold_lists_too():
    partition = make_partition(deep_mlp(2), {"a": ["0.weight", "1.bias"], "b": "0.bias", "c": ...})
    assert groups_of(partition) == {"a": ["0.weight", "1.bias"], "b": ["0.bias"], "c": ["1.weight"]}
    as_tuple = make_partition(deep_mlp(2), {"a": ("0.weight", "0.bias"), "c": ...})
    assert groups_of(as_tuple)["a"] == ["0.weight", "0.bias"]


def test_the_rest_may_come_first():
    partition = make_partition(deep_mlp(2), {"rest": ..., "biases": "bias"})
    assert partition.names == ("rest", "biases")


def test_lists_of_lists():
    partition = make_partition(deep_mlp(2), [["0.weight", "1.weight"], ["0.bias"], ["1.bias"]])
    assert groups_of(partition) == {
        "group0": ["0.weight", "1.weight"],
        "0.bias": ["0.bias"],
        "1.bias": ["1.bias"],
    }
    generated = make_partition(deep_mlp(2), ([name] for name in names(deep_mlp(2))))
    assert generated.names == make_partition(deep_mlp(2)).names


def test_tied_parameters_have_two_names_and_one_group():
    model = GPT()
    partition = make_partition(model, {"head": ["head.weight"], "rest": ...})
    assert groups_of(partition)["head"] == ["wte.weight"]
    assert "wte.weight" not in groups_of(partition)["rest"]
    assert make_partition(
        model, [["head.weight"], *[[n] for n in names(model) if n != "wte.weight"]]
    )


def test_index_sets_inside_a_tensor():
    model = nn.Sequential(nn.Linear(4, 6))
    rows = torch.tensor([0, 2])
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[1] = mask[4] = True
    partition = make_partition(
        model,
        {
            "rows": [("0.weight", rows), ("0.bias", 0)],
            "masked": [("0.weight", mask), ("0.bias", slice(1, 3))],
            "corner": [("0.weight", (3, slice(2, None)))],
            "others": [
                ("0.weight", (3, slice(0, 2))),
                ("0.weight", 5),
                ("0.bias", [3, 4, 5]),
            ],
        },
    )
    assert partition.sizes == (9, 10, 2, 9)
    assert partition.labels["0.weight"].tolist() == [
        [0] * 4,
        [1] * 4,
        [0] * 4,
        [3, 3, 2, 2],
        [1] * 4,
        [3] * 4,
    ]
    assert partition.labels["0.bias"].tolist() == [0, 1, 1, 3, 3, 3]
    assert [member.whole for member in partition.members[0]] == [False, False]
    assert partition.roles == ("mixed", "mixed", "weight", "mixed")


def test_an_index_that_takes_everything_is_the_whole_parameter():
    for index in (None, ..., slice(None), (slice(None), slice(None))):
        partition = make_partition(
            nn.Linear(2, 3), {"w": [("weight", index)], "b": [("bias", slice(0, 3))]}
        )
        assert partition.labels == {"weight": 0, "bias": 1}
        assert len(partition.param_groups()) == 2


# --- errors --------------------------------------------------------------------------------------

BIASES = ["0.bias", "1.bias"]
WRONG = {
    "in two groups": (
        {"a": "weight", "b": "0"},
        ["'0.weight'", "'a' and 'b'", "exclude each other"],
    ),
    "in two lists": ([["0.weight"], ["0.weight", "0.bias"]], ["'0.weight'", "in two groups"]),
    "twice in one group": ({"a": ["0.weight", "0.weight"], "b": ...}, ["twice in group 'a'"]),
    "alone in two groups": ([["0.weight"], ["0.weight"]], ["'0.weight'", "List it once"]),
    "in no group": ({"a": "weight"}, ["'0.bias' is in no group", "requires_grad_(False)", "..."]),
    "in no list": ([["0.weight"], BIASES], ["'1.weight' is in no group"]),
    "no groups": ({}, ["'0.weight' is in no group"]),
    "empty list": ({"a": [], "b": ...}, ["Group 'a' is empty", "Leave it out"]),
    "empty list of a list": ([[], names(deep_mlp(2))], ["Group 'group0' is empty"]),
    "empty rest": ({"a": ".", "b": ...}, ["'b' takes the rest", "Leave it out"]),
    "unknown name": (
        {"a": ["0.wieght"], "b": ...},
        ["Group 'a'", "'0.wieght'", "Did you mean '0.weight'"],
    ),
    "pattern without match": (
        {"a": "attention", "b": ...},
        ["Group 'a'", "'attention' matches no", "'0.weight', '0.bias'"],
    ),
    "no pattern": ({"a": "(", "b": ...}, ["Group 'a'", "'('", "not a valid regular expression"]),
    "two rests": ({"a": ..., "b": ...}, ["'a' and 'b'", "only one group can take the rest"]),
    "blocks": ("blocks-4", ["'blocks-4': expected", "from 1 to 1", "layers before the last one"]),
    "no blocks": ("blocks-0", ["'blocks-0'", "from 1 to 1"]),
    "alternate": ("alternate-2", ["'alternate-2': expected a number from 1 to 1"]),
    "chunks": ("chunks-3", ["'chunks-3': expected", "from 1 to 2, how many layers the model has"]),
    "no chunks": ("chunks-0", ["'chunks-0': expected a number from 1 to 2"]),
    "no number": ("blocks", ["'blocks' needs a number", "'blocks-2'"]),
    "letter for a number": ("alternate-k", ["needs a number", "'alternate-2'"]),
    "too deep": ("modules-2", ["'modules-2'", "at most 1 level deep. Use 'modules-1'."]),
    "depth 0": ("modules-0", ["'modules-0'", "Use 'modules-1'."]),
    "unknown": ("canonicle", ["Unknown partition 'canonicle'", "Did you mean 'canonical'"]),
    "half overlapping": (
        {"a": [("0.weight", 0)], "b": [("0.weight", slice(0, 2))], "c": ...},
        ["'0.weight' is in two groups, 'a' and 'b'"],
    ),
    "whole and part": (
        {"a": ["0.weight"], "b": [("0.weight", 0)], "c": ...},
        ["'0.weight' is in two groups, 'a' and 'b'"],
    ),
    "part and whole": (
        {"a": [("0.weight", 0)], "b": ["0.weight"], "c": ...},
        ["'0.weight' is in two groups, 'a' and 'b'"],
    ),
    "partly in no group": (
        {"a": [("0.weight", (slice(None), 0))], "b": ...},
        ["Entry (0, 1) of parameter '0.weight' is in no group"],
    ),
    "index out of range": (
        {"a": [("0.weight", 7)], "b": ...},
        ["Group 'a': 7 is not a valid index into parameter '0.weight' of shape (2, 2)"],
    ),
    "index that takes nothing": (
        {"a": [("0.weight", slice(5, 5))], "b": ...},
        ["selects no entry of parameter '0.weight'", "Leave it out"],
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_every_mistake_names_the_culprit_and_says_what_to_write(kind):
    spec, fragments = WRONG[kind]
    with pytest.raises(ValueError) as caught:
        make_partition(deep_mlp(2), spec)
    for fragment in fragments:
        assert fragment in str(caught.value)


TYPES = {
    "number": (3, ["3 is not a partition: use a name", "'canonical'"]),
    "list of names": (
        names(deep_mlp(2)),
        ["Group 0 is '0.weight'", "expected a list of parameter names"],
    ),
    "number for a group": ({"a": 3}, ["Group 'a' is 3", "regular expression"]),
    "number for a name": ({0: "weight", 1: ...}, ["Group names must be strings, not 0"]),
    "slice for a name": ({"a": ["0.weight", slice(2)], "b": ...}, ["Group 'a'", "(name, index)"]),
    "triple": ({"a": [("0.weight", 1, 2)], "b": ...}, ["Group 'a'", "(name, index)"]),
}


@pytest.mark.parametrize("kind", TYPES)
def test_wrong_types_are_told_what_to_write(kind):
    spec, fragments = TYPES[kind]
    with pytest.raises(TypeError) as caught:
        make_partition(deep_mlp(2), spec)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_errors_about_frozen_and_tied_parameters():
    model = deep_mlp(2)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0\.weight', which is frozen.*requires_grad_\(True\)"):
        make_partition(model, [["0.weight"], ["0.bias"], ["1.weight"], ["1.bias"]])
    with pytest.raises(ValueError, match=r"matches '0\.weight', which is frozen"):
        make_partition(model, {"a": r"^0\.weight", "b": ...})
    with pytest.raises(ValueError, match=r"'head\.weight', which is tied to 'wte\.weight'"):
        make_partition(GPT(), {"head": "^head", "rest": ...})
    with pytest.raises(ValueError, match=r"'wte\.weight' \(tied to 'head\.weight'\) is in two"):
        make_partition(GPT(), {"a": ["wte.weight"], "b": ["head.weight"], "c": ...})


def test_models_with_one_layer_or_none():
    with pytest.raises(ValueError, match=r"'blocks-1': the model has only one layer.*'canonical'"):
        make_partition(nn.Linear(2, 2), "blocks-1")
    with pytest.raises(ValueError, match=r"no parameter that requires a gradient.*requires_grad_"):
        make_partition(nn.ReLU())
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        make_partition(frozen, "trivial")
    assert len(make_partition(nn.Linear(2, 2), "chunks-1")) == 2


def test_lazy_modules_have_no_shape_yet():
    with pytest.raises(
        ValueError, match=r"'0\.weight' belongs to a lazy module.*Call the model once"
    ):
        make_partition(nn.Sequential(nn.LazyLinear(3)))


# --- what a partition does -----------------------------------------------------------------------


def test_parameter_groups_are_those_of_torch():
    model = vgg()
    partition = make_partition(model, "blocks-2")
    groups = partition.param_groups(lr=0.1, momentum=0.5)
    assert [group["name"] for group in groups] == list(partition.names)
    optimizer = torch.optim.SGD(groups, lr=1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1] * 6
    assert optimizer.param_groups[0]["momentum"] == 0.5
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == 18
    assert torch.optim.AdamW(make_partition(GPT()).param_groups(), lr=1e-3)


def test_parameter_groups_cannot_divide_a_tensor():
    partition = make_partition(nn.Linear(2, 2), "discrete")
    with pytest.raises(ValueError, match=r"'weight' is divided among groups.*'canonical'"):
        partition.param_groups()


def test_groups_are_found_by_name():
    partition = make_partition(deep_mlp(2))
    assert partition.index("1.weight") == 2
    with pytest.raises(KeyError, match=r"'1.wieght'.*Did you mean '1.weight'"):
        partition.index("1.wieght")
    with pytest.raises(KeyError, match=r"no group 'x'. Groups: '0.weight', '0.bias'"):
        partition.index("x")


def test_two_groups_cannot_have_one_name():
    partition = make_partition(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Two groups are called 'a'"):
        Partition(["a", "a"], partition.params, partition.labels)


def random_labels(generator, model, S):
    """Entries thrown into S groups at random, every group getting one at least."""
    sizes = [p.numel() for p in model.parameters()]
    labels = torch.randint(S, (sum(sizes),), generator=generator)
    labels[torch.randperm(sum(sizes), generator=generator)[:S]] = torch.arange(S)
    return dict(zip(names(model), labels.split(sizes), strict=True))


@given(seed=st.integers(0, 2**20), S=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_sums_over_groups_are_the_partition_matrix(seed, S):
    """inner is I_{S:P} Diag(a) b, scale is U I_{P:S} eta, and restrict is one of its columns."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    labels = random_labels(generator, model, S)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    spec = {
        f"g{s}": [
            (name, label.reshape(shapes[name]) == s)
            for name, label in labels.items()
            if bool((label == s).any())
        ]
        for s in range(S)
    }
    partition = make_partition(model, spec)
    matrix = torch.cat([torch.nn.functional.one_hot(x, S) for x in labels.values()]).T.double()
    a, b = (
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
        for _ in range(2)
    )
    flat_a, flat_b = (torch.cat([x.flatten() for x in d.values()]) for d in (a, b))
    torch.testing.assert_close(partition.inner(a, b), matrix @ (flat_a * flat_b))
    assert partition.sizes == tuple(matrix.sum(1).long().tolist())

    eta = torch.randn(S, generator=generator, dtype=torch.float64)
    scaled = torch.cat([x.flatten() for x in partition.scale(a, eta).values()])
    torch.testing.assert_close(scaled, flat_a * (matrix.T @ eta))
    for s in range(S):
        part = partition.restrict(a, s)
        whole = {n: part.get(n, torch.zeros(shape).double()) for n, shape in shapes.items()}
        flat = torch.cat([x.flatten() for x in whole.values()])
        assert torch.equal(flat, flat_a * matrix[s])

    again = Partition.from_state_dict(partition.state_dict())
    assert again.names == partition.names and again.sizes == partition.sizes
    assert again.members == partition.members and again.roles == partition.roles
    assert str(again).splitlines()[0] == str(partition).splitlines()[0]


def test_sums_over_groups_are_in_float32_at_least():
    model = nn.Linear(64, 64).bfloat16()
    partition = make_partition(model, "trivial")
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    total = partition.inner(ones, ones)
    assert total.dtype == torch.float32
    assert float(total) == 64 * 65


# --- the table -----------------------------------------------------------------------------------


def test_table_of_a_transformer():
    model = GPT()
    partition = make_partition(model, {"attention": r"\.attn\.", "embedding": "^wte", "rest": ...})
    assert str(partition) == (
        "Partition(3 groups, 384 parameters)\n"
        "   group      module                      role    entries  parameters\n"
        "0  attention  MultiheadAttention, Linear  mixed       160  "
        "8 tensors: blocks.0.attn.in_proj_weight ... blocks.1.attn.out_proj.bias\n"
        "1  embedding  Embedding                   weight       20  "
        "wte.weight (5, 4) = head.weight\n"
        "2  rest       GPT, LayerNorm, Linear      mixed       204  "
        "19 tensors: position ... ln_f.bias"
    )
    assert repr(partition) == "Partition(3 groups, 384 parameters)"


def test_table_of_index_sets():
    partition = make_partition(
        nn.Linear(1000, 4),
        {"first": [("weight", slice(0, 2))], "rest": [("weight", slice(2, 4)), "bias"]},
    )
    assert str(partition).splitlines()[2:] == [
        "0  first  Linear  weight    2,000  weight 2,000 of (4, 1000)",
        "1  rest   Linear  mixed     2,004  weight 2,000 of (4, 1000), bias (4,)",
    ]


def test_a_long_table_is_shortened_in_the_middle():
    lines = str(make_partition(nn.Linear(50, 4), "discrete")).splitlines()
    assert len(lines) < 70
    assert any("..." in line for line in lines)
    assert lines[-1].split()[:2] == ["203", "bias[3]"]
