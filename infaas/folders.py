"""Models as others keep them: MLflow's model folders and Triton's model repositories. Nothing of them is unpickled.

What has no labels is measured by its agreement with the model itself: on the folder's input example, or on random items.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from infaas.errors import BadInput, InfaasError
from infaas.inputs import read_text
from infaas.queries import check_name

MLMODEL = "MLmodel"
RANDOM_ITEMS = 256  # that a model without samples answers
LEAST_ITEMS = 20  # that accuracy is measured on
_KEY = re.compile(r"( *)([\w.-]+):(?: +(.*))?\Z")
_INPUTS = re.compile(r"^signature:\s*\n(?:  .*\n)*?  inputs:\s*'((?:[^']|'')*)'", re.MULTILINE)
_SIGN = "save the model again with the signature of these samples (infer_signature)"
_WITHOUT = "give samples with --validation, or save it again with input_example="
_IN_PYTHON = (
    "open it yourself in Python, where you trust it, and pass the object: infaas.register(model, x, y, app='...')"
)


def is_mlflow(path: str | Path) -> bool:
    """Whether it is a folder that MLflow has written."""
    return (Path(path) / MLMODEL).is_file()


def mlflow_model(folder: Path) -> Any:
    """The model in it: a path of an .onnx or .pt2 file, or an object of xgboost, lightgbm or scikit-learn. Raises BadInput."""
    told = _scalars(read_text(folder / MLMODEL))
    flavours = {key.split(".")[1] for key in told if key.startswith("flavors.")} - {"python_function"}

    def file(flavour: str, *keys: str) -> Path:
        name = next((told[f"flavors.{flavour}.{key}"] for key in keys if f"flavors.{flavour}.{key}" in told), "")
        path = folder / name
        there = path.exists() if flavour == "pytorch" else path.is_file()
        if not (name and there and _inside(path, folder)):
            named = f"names {name}, which is not in the folder" if name else "names no file"
            raise BadInput(
                f"{folder}: the flavour {flavour} of its {MLMODEL} {named}: copy the folder whole, or save the model again"
            )
        return path

    def opened(flavour: str, make: Callable[..., Any], path: Path, *more: str) -> Any:
        try:
            return make(path, *more)
        except InfaasError:
            raise
        except Exception as error:
            raise BadInput(
                f"{path}: {flavour} cannot open it ({short_of(error)}): copy it again, or save the model again"
            ) from error

    if "onnx" in flavours:
        return file("onnx", "data")
    if "xgboost" in flavours:
        path = file("xgboost", "data")
        return opened("xgboost", _xgboost, path, told.get("flavors.xgboost.model_class", ""))
    if "lightgbm" in flavours:
        return opened("lightgbm", _lightgbm, file("lightgbm", "data"))
    if "sklearn" in flavours:
        return opened("skops", _sklearn, file("sklearn", "pickled_model"))
    if "pytorch" in flavours:
        place = file("pytorch", "model_data")
        found = [place, *place.glob("*.pt2")] if place.is_dir() else [place]
        return next((one for one in found if one.suffix == ".pt2"), None) or _refuse(place, "a pickle of torch")
    raise BadInput(
        f"{folder}: of the flavours in its {MLMODEL} ({', '.join(sorted(flavours)) or 'none'}) none is known: onnx, xgboost, lightgbm, "
        f"sklearn and pytorch are; {_IN_PYTHON}"
    )


def example_of(folder: Path) -> Any:
    """The folder's input example: a DataFrame, an array, or arrays by name. Raises BadInput if there is none.

    One of a few rows, as most are, is followed by rows that are drawn from its columns.
    """
    told = _scalars(read_text(folder / MLMODEL))
    path = folder / told.get("saved_input_example_info.artifact_path", "")
    if not path.is_file() or path.suffix != ".json" or not _inside(path, folder):
        raise BadInput(f"{folder} has no input example: {_WITHOUT}")
    try:
        return signed(folder, _example(json.loads(read_text(path))))
    except InfaasError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path} is no input example ({short_of(error)}): {_WITHOUT}") from error


def _example(found: Any) -> Any:
    import numpy as np  # noqa: PLC0415

    def drawn(given: Any) -> Any:
        array = np.asarray(given)
        if array.dtype.kind == "O":  # null is no number
            array = array.astype(str if all(isinstance(one, str) for one in array.ravel()) else float)
        if array.ndim == 0 or array.dtype.kind not in "biufU" or len(array) == 0:
            raise ValueError("it holds no rows of numbers or texts")
        if len(array) >= LEAST_ITEMS:
            return array
        flat = array.reshape(len(array), -1)
        at = np.random.default_rng(0).integers(len(array), size=(RANDOM_ITEMS, flat.shape[1]))
        return np.concatenate([array, flat[at, np.arange(flat.shape[1])].reshape(-1, *array.shape[1:])])

    if not isinstance(found, dict):
        return drawn(found)
    found = found.get("dataframe_split", found)
    if "columns" in found:
        import_of("pandas", "")
        import pandas as pd  # noqa: PLC0415

        table = pd.DataFrame(found["data"], columns=found["columns"])
        return pd.DataFrame({name: drawn(table[name].to_numpy()) for name in table})
    inputs = found.get("inputs", found)
    return {name: drawn(one) for name, one in inputs.items()} if isinstance(inputs, dict) else drawn(inputs)


def signed(folder: Path, x: Any) -> Any:
    """Samples with the names of columns that the folder's signature has. Raises BadInput if they do not fit it."""
    found, shape = _INPUTS.search(read_text(folder / MLMODEL)), list(getattr(x, "shape", ()))[1:]
    if found is None or not shape:
        return x
    try:
        specs = json.loads(" ".join(found[1].replace("''", "'").split()))
        tensors = [one["tensor-spec"]["shape"][1:] for one in specs if "tensor-spec" in one]
        names = [] if tensors else [str(one["name"]) for one in specs if "name" in one]
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(
            f"{folder}: the signature in its {MLMODEL} cannot be read ({short_of(error)}): {_SIGN}"
        ) from error
    right = tensors[0] if tensors else [len(specs)]
    if len(shape) != len(right) or any(one not in (-1, n) for one, n in zip(right, shape, strict=True)):
        raise BadInput(
            f"{folder}: an item of the samples has the shape {shape}, and of the signature in its {MLMODEL} {right}: {_SIGN}"
        )
    if len(names) == shape[0] and not hasattr(x, "columns"):
        with suppress(ImportError):
            import pandas as pd  # noqa: PLC0415

            return pd.DataFrame(x, columns=names)
    return x


def random_samples(path: Path) -> dict[str, Any]:
    """Random items for a model that came without samples. Raises BadInput unless it is an ONNX file."""
    import numpy as np  # noqa: PLC0415

    if path.suffix != ".onnx":
        raise BadInput(f"{path.name}: give samples with --validation")
    import_of("onnxruntime", "up", "run")
    import onnxruntime  # noqa: PLC0415

    from infaas.inputs import random_items  # noqa: PLC0415
    from infaas.trial import specs_of  # noqa: PLC0415

    try:
        specs = specs_of(onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]))
    except Exception as error:
        raise BadInput(f"{path} cannot be run ({short_of(error)}): export the model again") from error
    return random_items(specs, RANDOM_ITEMS, np.random.default_rng(0))


def _xgboost(path: Path, kind: str) -> Any:
    import_of("xgboost", "boosting")
    import xgboost  # noqa: PLC0415

    booster = xgboost.Booster(model_file=str(path))
    objective = json.loads(booster.save_config())["learner"]["objective"]["name"]
    classes = "Classifier" in kind or objective.startswith(("binary:", "multi:"))
    model = (xgboost.XGBClassifier if classes else xgboost.XGBRegressor)()
    model.load_model(path)
    return model


def _lightgbm(path: Path) -> Any:
    """A booster's text as scikit-learn's interface, which conversion takes."""
    if path.suffix == ".pkl":
        _refuse(path, "a pickle")
    import_of("lightgbm", "boosting")
    import lightgbm  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    from sklearn.preprocessing import LabelEncoder  # noqa: PLC0415

    if "\nend of trees\n" not in read_text(path):
        raise ValueError("its text breaks off")  # which would end the process
    booster = lightgbm.Booster(model_file=str(path))
    objective = str(booster.dump_model()["objective"]).split(" ")[0]
    classes = objective in ("binary", "multiclass", "multiclassova")
    model = (lightgbm.LGBMClassifier if classes else lightgbm.LGBMRegressor)()
    model._Booster, model.fitted_ = booster, True
    model._n_features = model._n_features_in = booster.num_feature()
    if classes:
        model._n_classes = max(2, booster.num_model_per_iteration())
        model._classes, model._objective = np.arange(model._n_classes), objective
        model._le = LabelEncoder().fit(model._classes)
    return model


def _sklearn(path: Path) -> Any:
    if path.suffix != ".skops":
        _refuse(path, "a pickle")
    import_of("skops", "")
    import skops.io  # noqa: PLC0415

    if unknown := skops.io.get_untrusted_types(file=path):
        _refuse(path, f"not safe to open (it holds {', '.join(unknown)})")
    return skops.io.load(path)


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def import_of(package: str, extra: str, to: str = "open") -> None:
    """Raises BadInput, with how it is installed, if a package is not there. to: what it is needed for."""
    from importlib.util import find_spec  # noqa: PLC0415

    if find_spec(package) is None:
        wanted = f"'infaas[{extra}]'" if extra else package
        raise BadInput(f"model: {package} is needed to {to} it: pip install {wanted}")


def _refuse(path: Path, what: str) -> Any:
    raise BadInput(f"{path.name} is {what}, which runs code when it is opened, so it is not taken: {_IN_PYTHON}")


def _scalars(text: str) -> dict[str, str]:
    """Texts and numbers of a YAML file of nested maps, by their paths, as flavors.onnx.data. Lists and texts of several lines are passed over."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        if (one := _KEY.match(line)) is None:
            continue
        depth = len(one[1])
        above = [*(each for each in above if each[0] < depth), (depth, one[2])]
        value = (one[3] or "").strip().strip("'\"")
        if value and value != "null":
            found[".".join(name for _, name in above)] = value
    return found


# -- a model repository of Triton

_LABELS = re.compile(r'label_filename\s*:\s*"([^"]+)"')
_FILE_NAME = re.compile(r'default_model_filename\s*:\s*"([^"]+)"')
_NAME = re.compile(r'^name\s*:\s*"([^"]+)"', re.MULTILINE)
_ENGINE = re.compile(r'^\s*(?:platform|backend)\s*:\s*"([^"]+)"', re.MULTILINE)


class RepositoryModel(NamedTuple):
    """A model of a repository. left_out: why it is not taken. labels: names of its classes."""

    name: str
    file: Path
    labels: list[str]
    left_out: str = ""


def repository(folder: Path) -> list[RepositoryModel]:
    """The models of Triton's repository, each with its newest version's file. Raises BadInput if none of them can be taken."""
    found = [_kept(place) for place in sorted(one for one in folder.iterdir() if one.is_dir())]
    if all(one.left_out for one in found):
        why = "; ".join(f"{one.name}: {one.left_out}" for one in found[:3]) or "it has no NAME/VERSION/model.onnx"
        raise BadInput(f"{folder} is no model repository that can be taken: {why}")
    return found


def _kept(place: Path) -> RepositoryModel:
    config, labels = place / "config.pbtxt", list[str]()
    versions = sorted((int(one.name), one) for one in place.iterdir() if one.is_dir() and one.name.isdecimal())
    file = versions[-1][1] / "model.onnx" if versions else place
    try:
        told = read_text(config) if config.is_file() else ""
        own, named, listed, engine = (one.search(told) for one in (_NAME, _FILE_NAME, _LABELS, _ENGINE))
        file = _of(file.parent, named[1]) if named and versions else file
        check_name(place.name, "name")
        if engine is not None and "onnx" not in engine[1]:
            raise BadInput(f"it is of {engine[1]}, and only ONNX is taken: export it to ONNX")
        if any(told.count(pair[0]) != told.count(pair[1]) for pair in ("{}", "[]")):
            raise BadInput("config.pbtxt has brackets without their other halves: mend it, or leave it out")
        if own is not None and own[1] != place.name:
            raise BadInput(f"config.pbtxt is of {own[1]!r}: give the folder that name")
        if not file.is_file() or not _inside(file, place):
            raise BadInput(
                f"it has no {f'{file.parent.name}/{file.name}' if versions else 'VERSION/model.onnx, as 1/model.onnx'}"
            )
        if listed is not None:
            labels = [one.strip() for one in read_text(_of(place, listed[1])).splitlines() if one.strip()]
    except InfaasError as error:
        return RepositoryModel(place.name, file, [], str(error))
    return RepositoryModel(place.name, file, labels)


def _of(place: Path, name: str) -> Path:
    if not _inside(place / name, place):
        raise BadInput(f"{name} is not in its folder: copy it there")
    return place / name


def whole_onnx(path: Path, directory: Path) -> Path:
    """The file itself; of an ONNX model whose weights are in files beside it, a copy in `directory` that holds them. Raises BadInput."""
    if path.suffix.lower() != ".onnx" or not _has_external(path):
        return path
    import_of("onnx", "sklearn", "convert")
    import onnx  # noqa: PLC0415

    try:
        model = onnx.load(str(path))  # reads the files beside it
        whole = directory / path.name
        onnx.save(model, str(whole), save_as_external_data=False)
    except Exception as error:
        raise BadInput(
            f"{path.name} keeps its weights in files beside it, which cannot be put into one file ({short_of(error)}): are they all "
            "there? Models above 2 GB cannot be registered"
        ) from error
    return whole


def _has_external(path: Path) -> bool:
    """Whether the file names files beside it. torch.onnx.export writes them by default."""
    with suppress(OSError):
        return any(path.parent.glob(f"{path.name}.*")) or any(path.parent.glob("*.data"))
    return False


def short_of(error: Exception) -> str:
    text = " ".join(str(error).partition("Stack trace:")[0].split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
