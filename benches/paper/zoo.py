"""The paper's models as profiles: 22 architectures, 175 variants, from a table of facts and stated rules.

`python benches/paper/zoo.py` writes fig5.toml, the scenario of Figure 5; `zoo()` is the catalogue alone. Nothing is drawn: the
same every time. The paper (Romero et al., "INFaaS") prints each architecture's accuracy, layers, parameters and number of
variants (Table 8; sums by family in Table 6), and of the profiles only ranges. So what follows is made, from

  measured    ResNet152 (PyTorch) on one core of a CPU: 155 + 592 b ms for a batch of b (profiles of InferLine's authors), which is
              1.02 ms a layer and 51.5 ms an item for each GFLOP; on several cores the part of an item shrinks to about 0.7
  Table 2     ResNet50: 4 CPUs 200 ms; an Inferentia core 20 ms, 100 queries/s; Fig. 6: TensorRT 750 queries/s and more in batches
              of 8, over 300 one at a time. The rules give 199 ms; 20 ms and 100; 812 and 312
  section 2.1 ranges: 1.5 ms (AlexNet, TensorRT) to 5.7 s (NasNetLarge, one core); loading 0.59 s (MobileNetV2 on a CPU) to 11 s
              (VGG19, TensorRT, batch 64). The rules are fitted to these four ends
  Fig. 6      memory of a TensorRT variant: 1.33 of the CPU's (batch 1), 1.34 (batch 8); of an Inferentia one 1.1

and, where none of these says anything, from assumptions, each marked so below.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

OUT = Path(__file__).parent / "fig5.toml"


class Architecture(NamedTuple):
    """A row of Table 8, with its family of Table 6. gflops: multiply-adds of one inference, as commonly published.

    separable: made of depthwise-separable convolutions, which wait for memory more than they compute. GNMT's layers count for
    each of 25 words, and gflops are its parameters outside the embedding times the same (assumption).
    """

    name: str
    family: str
    accuracy: float
    variants: int
    layers: int
    parameters: int
    gflops: float
    separable: bool = False


ARCHITECTURES = (
    Architecture("mobilenetv1", "MobileNet", 0.704, 10, 30, 4_253_864, 0.57, True),
    Architecture("mobilenetv2", "MobileNet", 0.713, 3, 30, 3_538_984, 0.31, True),
    Architecture("alexnet", "AlexNet", 0.566, 9, 8, 62_378_344, 0.72),
    Architecture("densenet121", "DenseNet", 0.750, 12, 121, 8_062_504, 2.9),
    Architecture("densenet169", "DenseNet", 0.762, 5, 169, 14_307_880, 3.4),
    Architecture("densenet201", "DenseNet", 0.773, 5, 201, 20_242_984, 4.3),
    Architecture("resnet50", "ResNet", 0.749, 19, 50, 25_636_712, 4.1),
    Architecture("resnet50v2", "ResNet", 0.760, 4, 50, 25_613_800, 4.1),
    Architecture("resnext50", "ResNet", 0.777, 3, 50, 25_700_000, 4.3),
    Architecture("resnet101", "ResNet", 0.764, 12, 101, 44_707_176, 7.8),
    Architecture("resnet101v2", "ResNet", 0.772, 4, 101, 44_675_560, 7.8),
    Architecture("resnext101", "ResNet", 0.787, 3, 101, 45_300_000, 8.0),
    Architecture("resnet152", "ResNet", 0.766, 12, 152, 60_419_944, 11.5),
    Architecture("resnet152v2", "ResNet", 0.780, 4, 152, 60_380_648, 11.5),
    Architecture("vgg16", "VGG", 0.713, 18, 16, 138_357_544, 15.5),
    Architecture("vgg19", "VGG", 0.713, 12, 19, 143_667_240, 19.6),
    Architecture("inceptionv3", "Inception", 0.779, 12, 48, 23_851_784, 5.7),
    Architecture("xception", "Inception", 0.790, 3, 76, 22_910_480, 8.4, True),
    Architecture("inception-resnetv2", "Inception", 0.803, 10, 164, 55_873_736, 13.2),
    Architecture("nasnetmobile", "NasNet", 0.744, 3, 914, 5_326_716, 0.56, True),
    Architecture("nasnetlarge", "NasNet", 0.825, 3, 1244, 88_949_818, 24.0, True),
    Architecture("gnmt", "GNMT", 0.245, 9, 16 * 25, 210_000_000, 4.0),  # accuracy: BLEU 24.5
)
FAMILIES = {
    "MobileNet": 13,
    "AlexNet": 9,
    "DenseNet": 22,
    "ResNet": 61,
    "VGG": 30,
    "Inception": 25,
    "NasNet": 6,
    "GNMT": 9,
}

POPULAR = ("densenet121", "resnet50", "vgg16", "inceptionv3")  # in the paper's order
POPULAR_MS, COLD = 50.0, 1.5  # objectives: of the popular; of the rest, times the fastest CPU variant's latency


class Variant(NamedTuple):
    """One block of the file."""

    name: str
    architecture: Architecture
    hardware: str
    threads: int
    max_batch: int
    base_ms: float
    per_item_ms: float
    load_s: float
    memory_gb: float

    @property
    def latency_ms(self) -> float:
        return self.base_ms + self.per_item_ms

    @property
    def capacity_qps(self) -> float:
        """One batch of the largest size after the other."""
        return 1000.0 * self.max_batch / (self.base_ms + self.per_item_ms * self.max_batch)


# Which variants an architecture has is known by number only. Assumption: what has few has what is registered first, the plain
# frameworks; TensorRT comes in all seven batch sizes or not at all.
_PLAIN = ("tf-cpu-t4", "tf-cpu-t1", "tf-gpu-b1", "neuron-b2", "torch-cpu-t4")
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_TRT = tuple(f"trt-gpu-b{batch}" for batch in _BATCHES)
_LADDERS: dict[int, tuple[str, ...]] = {
    3: _PLAIN[:3],
    4: _PLAIN[:4],
    5: _PLAIN,
    9: (*_PLAIN[:2], *_TRT),  # of GNMT, which TensorRT did not take then: torch-gpu
    10: (*_PLAIN[:2], _PLAIN[3], *_TRT),
    12: (*_PLAIN, *_TRT),
}
_LADDERS[18] = (
    *_LADDERS[12], "torch-cpu-t1", "torch-gpu-b1", "torch-gpu-b8", "torch-gpu-b32", "tf-gpu-b8", "tf-gpu-b32"
)  # fmt: skip
_LADDERS[19] = (*_LADDERS[18], "caffe2-gpu-b1")

# ms of a batch = (call + layer x layers) + item x GFLOPs x b
_CPU_LAYER, _CPU_ITEM, _CPU_SEVERAL = 1.02, 51.5, 0.70
_CPU_SEPARABLE = 3.6  # times the GFLOPs' part: NasNetLarge then takes 5.7 s on a core
_GPU_CALL, _GPU_LAYER, _GPU_ITEM = 1.15, 0.022, 0.232  # a V100 with TensorRT
_NEURON_CALL, _NEURON_ITEM = 5.0, 3.66  # a core; two items pass through it together, as its 100 queries/s at 20 ms say
_SLOWER = {"tf": 1.0, "torch": 1.1, "caffe2": 1.1}  # assumption; on a GPU times _PLAIN_GPU, which is one as well
_PLAIN_GPU = 1.6
# s to load = fixed + 6.5 for each GB of parameters + 0.035 for each item of a TensorRT batch
_LOAD_S, _LOAD_GB, _LOAD_BATCH = {"cpu": 0.5, "inferentia": 3.0, "gpu": 3.0, "trt": 5.0}, 6.5, 0.035
# GB = (0.8 + 2 x parameters) x by hardware; ResNet50 on a CPU: 1.0
_MEMORY = {"cpu": 1.0, "inferentia": 1.1, "gpu": 1.5, "trt": 1.33}
_MEMORY_BATCH = 0.0015  # more for each further item of a batch


def variant(of: Architecture, what: str) -> Variant:
    """One variant by the rules. what: framework, hardware, and threads or largest batch."""
    framework, *rest = what.split("-")
    kind, number = ("inferentia", rest[0]) if framework == "neuron" else (rest[0], rest[1])
    size = int(number[1:])
    work = of.gflops * (_CPU_SEPARABLE if of.separable else 1.0)
    weights = 4.0 * of.parameters / 1e9
    sort = "trt" if framework == "trt" else kind
    threads, batch = (size, 1) if kind == "cpu" else (1, size)
    if kind == "cpu":
        base, item = _CPU_LAYER * of.layers, _CPU_ITEM * work * (_CPU_SEVERAL if threads > 1 else 1.0)
    elif kind == "inferentia":
        base, item = _NEURON_CALL + _NEURON_ITEM * work, 0.0
    else:
        base, item = _GPU_CALL + _GPU_LAYER * of.layers, _GPU_ITEM * work
    slower = 1.0 if framework in ("trt", "neuron") else _SLOWER[framework] * (_PLAIN_GPU if kind == "gpu" else 1.0)
    return Variant(
        name=f"{of.name}-{what}",
        architecture=of,
        hardware=kind,
        threads=threads,
        max_batch=batch,
        base_ms=slower * base,
        per_item_ms=slower * item,
        load_s=_LOAD_S[sort] + _LOAD_GB * weights + (_LOAD_BATCH * batch if sort == "trt" else 0.0),
        memory_gb=(0.8 + 2.0 * weights) * (_MEMORY[sort] + _MEMORY_BATCH * (batch - 1)),
    )


def variants(of: Architecture) -> list[Variant]:
    """All of an architecture, in the ladder's order."""
    names = _LADDERS[of.variants]
    if of.family == "GNMT":
        names = tuple(what.replace("trt", "torch") for what in names)
    return [variant(of, what) for what in names]


def zoo() -> dict[str, list[Variant]]:
    """By architecture."""
    return {of.name: variants(of) for of in ARCHITECTURES}


def objective_ms(name: str, of: Sequence[Variant]) -> float:
    """What an app's queries ask for."""
    return POPULAR_MS if name in POPULAR else COLD * min(one.latency_ms for one in of if one.hardware == "cpu")


# ---- Figure 5 ----

QUERIES = 113_420  # in the paper
# The paper says neither how long a run is nor how a day was sped up; the number of queries fixes one by the other. The file
# replays the first four hours in 761 s, which leaves each plateau 10 to 20 s; fig5.py replays the whole day in 634 s, too.
DURATION_S, LINES = 761.0, 1440
DAY_S, DAY_LINES = 634.0, 8640
RANGE = (10, 1000)
ZIPF = 1.62  # the exponent with which the first four of 22 have 80 % of the load
CPU_WORKERS, GPU_WORKERS = 5, 7  # of the static systems
_CPU_GB, _SHARE, _CORES = 32.0, 0.8, 8  # of a CPU worker; the part of memory that instances may take

HEAD = """\
# Figure 5 of INFaaS (Romero et al., section 6.1): 22 models with 175 variants under load that rises and falls. Written by
# `python benches/paper/zoo.py`, which says where every number comes from: change it there.
#
#     infaas simulate benches/paper/fig5.toml            python benches/paper/fig5.py     with the paper's numbers beside

[scenario]
name = "fig5"
duration_s = {duration:g}
seed = 1
policies = ["infaas", "clipper+", "sm+"]

# Machines and US$ per hour as section 6 names them: m5.2xlarge, p3.2xlarge, inf1.2xlarge. The price of the last is the one at which
# the paper's 1.23 comes out of its own numbers of machines: (5 x 0.384 + 7 x 3.06) / (5 x 0.384 + 5 x 3.06 + 3 x 0.584). Cores beside an
# accelerator feed it and serve nothing themselves (assumption). boot_s: section 4.2.3 has 20 to 30 s.
[[worker]]
kind = "cpu"
devices = {{ cpu = 8 }}
resources = {{ memory_gb = 32 }}
price_per_hour = 0.384
boot_s = 25
start = 5
min = 5
max = 8

[[worker]]
kind = "gpu"
devices = {{ gpu = 1 }}
resources = {{ gpu_memory_gb = 16 }}
price_per_hour = 3.06
boot_s = 30
start = 5
min = 5
max = 8

[[worker]]
kind = "inferentia"
devices = {{ inferentia = 1 }}
resources = {{ inferentia_memory_gb = 8 }}
price_per_hour = 0.584
boot_s = 25
start = 2
min = 2
max = 5

[interference]
gpu = 1.0

# One stream over all apps by Zipf's law, {hours:g} h of the trace in the {duration:g} s: first the four popular ones, which then have 80 % of it, then the rest as in Table 8.
[[load]]
apps = [{apps}]
shares = {{ zipf = {zipf} }}
arrivals = "trace"
file = "traces/lookalike-day.txt"
seconds_per_line = {per_line:.6g}
range_qps = [{low}, {high}]
"""

STATIC = """
# What a developer chose: of the popular models the TensorRT variant {of}, of the rest the CPU variant that
# carries most on a core within its objective. {how}
[[policy]]
name = "{name}"
start = {{ cpu = 5, gpu = 7 }}
{more}
[policy.choice]
"""


def shares() -> dict[str, float]:
    """By app, in the order of popularity."""
    names = [*POPULAR, *(of.name for of in ARCHITECTURES if of.name not in POPULAR)]
    weights = [rank**-ZIPF for rank in range(1, len(names) + 1)]
    return {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)}


def carried_qps(one: Variant, limit_ms: float) -> float:
    """One query at a time, with waits within what the objective leaves (mean wait of M/D/1)."""
    wait = max(limit_ms - one.latency_ms, 0.0)
    return 1000.0 / one.latency_ms * 2 * wait / (2 * wait + one.latency_ms)


def cold_choice(of: Sequence[Variant], limit_ms: float) -> Variant:
    """The CPU variant that carries most on a core."""
    return max((one for one in of if one.hardware == "cpu"), key=lambda one: carried_qps(one, limit_ms) / one.threads)


def on_each(chosen: dict[str, Variant], limits: dict[str, float]) -> dict[str, int]:
    """Instances of cold models on each CPU worker: one, then one more for what lacks most at the peak, while memory lasts."""
    counts = dict.fromkeys(chosen, 1)
    free = _CPU_GB * _SHARE - sum(one.memory_gb for one in chosen.values())
    peak = {name: RANGE[1] * share / CPU_WORKERS for name, share in shares().items()}
    while True:
        able = [n for n, one in chosen.items() if one.memory_gb <= free and counts[n] < _CORES // one.threads]
        lack = {name: peak[name] - counts[name] * carried_qps(chosen[name], limits[name]) for name in able}
        name = max(lack, key=lambda name: lack[name], default="")
        if not name or lack[name] <= 0.0:
            return counts
        counts[name] += 1
        free -= chosen[name].memory_gb


def choices(batch: int) -> Iterator[str]:
    """Lines of a static system's choice."""
    models = zoo()
    limits = {name: objective_ms(name, of) for name, of in models.items()}
    cold = {name: cold_choice(models[name], limits[name]) for name in shares() if name not in POPULAR}
    each = on_each(cold, limits)
    for name in shares():
        if name in POPULAR:
            yield f'{name} = {{ variant = "{name}-trt-gpu-b{batch}", instances = {GPU_WORKERS} }}'
        else:
            yield f'{name} = {{ variant = "{cold[name].name}", instances = {each[name] * CPU_WORKERS} }}'


def static(name: str, batch: int, of: str, how: str, more: str = "") -> str:
    return STATIC.format(name=name, of=of, how=how, more=more) + "\n".join(choices(batch)) + "\n"


def block(one: Variant) -> str:
    """A [[variant]] block."""
    lines = [
        "[[variant]]",
        f'app = "{one.architecture.name}"',
        f'model = "{one.architecture.name}"',
        f'name = "{one.name}"',
        f'hardware = "{one.hardware}"',
        f"accuracy = {one.architecture.accuracy:g}",
        f"base_ms = {one.base_ms:.5g}",
        f"per_item_ms = {one.per_item_ms:.5g}",
        f"max_batch = {one.max_batch}",
        f"load_s = {one.load_s:.4g}",
        f"memory_gb = {one.memory_gb:.4g}",
        *([f"uses = {{ cpu_cores = {one.threads} }}"] if one.hardware == "cpu" else []),
    ]
    return "\n".join(lines) + "\n"


def text() -> str:
    """The whole of fig5.toml."""
    models = zoo()
    parts = [
        HEAD.format(
            duration=DURATION_S,
            apps=", ".join(f'"{name}"' for name in shares()),
            zipf=ZIPF,
            per_line=DURATION_S / LINES,
            hours=LINES / 360,
            low=RANGE[0],
            high=RANGE[1],
        ),
        static("clipper+", 8, "of batch 8", "As many instances as the machines hold, so that it performs best."),
        static(
            "sm+",
            1,
            "of batch 1, as in Fig. 6",
            "Begins with one instance of each.",
            "min = { cpu = 5, gpu = 7 }\nmax = { cpu = 5, gpu = 7 }",
        ),
    ]
    for name, of in models.items():
        parts.append(f'\n[[app]]\nname = "{name}"\nlatency_ms = {objective_ms(name, of):.5g}\n')
        parts.extend("\n" + block(one) for one in of)
    return "".join(parts)


def main() -> None:
    """Write the file."""
    OUT.write_text(text())


if __name__ == "__main__":
    main()
