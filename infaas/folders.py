"""Models as others keep them: MLflow's model folders and Triton's model repositories. Nothing of them is unpickled.

What has no labels is measured by its agreement with the model itself: on the folder's input example, or on random items.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from infaas.errors import BadInput

MLMODEL = "MLmodel"
RANDOM_ITEMS = 256  # that a model without samples answers
LEAST_ITEMS = 20  # that accuracy is measured on
_KEY = re.compile(r"( *)([\w.-]+):(?: +(.*))?\Z")
_IN_PYTHON = (
    "open it yourself in Python, where you trust it, and pass the object: infaas.register(model, x, y, app='...')"
)


def is_mlflow(path: str | Path) -> bool:
    """Whether it is a folder that MLflow has written."""
    return (Path(path) / MLMODEL).is_file()


def mlflow_model(folder: Path) -> Any:
    """The model in it: a path of an .onnx or .pt2 file, or an object of xgboost, lightgbm or scikit-learn. Raises BadInput."""
    told = _scalars((folder / MLMODEL).read_text("utf-8"))
    flavours = {key.split(".")[1] for key in told if key.startswith("flavors.")} - {"python_function"}

    def file(flavour: str, *keys: str) -> Path:
        name = next((told[f"flavors.{flavour}.{key}"] for key in keys if f"flavors.{flavour}.{key}" in told), "")
        path = folder / name
        if not name or not path.resolve().is_relative_to(folder.resolve()) or not path.exists():
            raise BadInput(f"{folder}: its {MLMODEL} names no file of the flavour {flavour} that is there")
        return path

    if "onnx" in flavours:
        return file("onnx", "data")
    if "xgboost" in flavours:
        return _xgboost(file("xgboost", "data"), told.get("flavors.xgboost.model_class", ""))
    if "lightgbm" in flavours:
        return _lightgbm(file("lightgbm", "data"))
    if "sklearn" in flavours:
        return _sklearn(file("sklearn", "pickled_model"))
    if "pytorch" in flavours:
        place = file("pytorch", "model_data")
        found = [place, *place.glob("*.pt2")] if place.is_dir() else [place]
        return next((one for one in found if one.suffix == ".pt2"), None) or _refuse(place, "a pickle of torch")
    raise BadInput(
        f"{folder}: of the flavours {', '.join(sorted(flavours)) or 'in it'} none is known: onnx, xgboost, lightgbm, sklearn and pytorch are"
    )


def example_of(folder: Path) -> Any:
    """The folder's input example: a DataFrame, an array, or arrays by name. Raises BadInput if there is none.

    One of a few rows, as most are, is followed by rows that are drawn from its columns.
    """
    import numpy as np  # noqa: PLC0415

    told = _scalars((folder / MLMODEL).read_text("utf-8"))
    path = folder / told.get("saved_input_example_info.artifact_path", "")
    if not path.is_file() or path.suffix != ".json":
        raise BadInput(f"{folder} has no input example: give samples with --validation, or save it with input_example=")

    def drawn(given: Any) -> Any:
        array = np.asarray(given)
        if not 0 < len(array) < LEAST_ITEMS:
            return array
        flat = array.reshape(len(array), -1)
        at = np.random.default_rng(0).integers(len(array), size=(RANDOM_ITEMS, flat.shape[1]))
        return np.concatenate([array, flat[at, np.arange(flat.shape[1])].reshape(-1, *array.shape[1:])])

    found = json.loads(path.read_text("utf-8"))
    if isinstance(found, list):
        return drawn(found)
    if "dataframe_split" in found:
        found = found["dataframe_split"]
    if "columns" in found:
        import_of("pandas", "")
        import pandas as pd  # noqa: PLC0415

        table = pd.DataFrame(found["data"], columns=found["columns"])
        return pd.DataFrame({name: drawn(table[name].to_numpy()) for name in table})
    inputs = found.get("inputs", found)
    return {name: drawn(one) for name, one in inputs.items()} if isinstance(inputs, dict) else drawn(inputs)


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
        raise BadInput(f"{path.name} cannot be run: {' '.join(str(error).split())[:200]}") from error
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
_ENGINE = re.compile(r'^\s*(?:platform|backend)\s*:\s*"([^"]+)"', re.MULTILINE)


class RepositoryModel(NamedTuple):
    """A model of a repository. left_out: why it is not taken. labels: names of its classes."""

    name: str
    file: Path
    labels: list[str]
    left_out: str = ""


def repository(folder: Path) -> list[RepositoryModel]:
    """The models of Triton's repository, each with its newest version's file. Raises BadInput if there is none."""
    found = []
    for place in sorted(one for one in folder.iterdir() if one.is_dir()):
        config = place / "config.pbtxt"
        told = config.read_text("utf-8", "replace") if config.is_file() else ""
        named, labels, engine = (one.search(told) for one in (_FILE_NAME, _LABELS, _ENGINE))
        versions = sorted((int(one.name), one) for one in place.iterdir() if one.is_dir() and one.name.isdecimal())
        file = versions[-1][1] / (named[1] if named else "model.onnx") if versions else place
        why = "" if file.is_file() else "it has no VERSION/model.onnx"
        why = why if engine is None or "onnx" in engine[1] else f"it is of {engine[1]}, and only ONNX is taken"
        names = place / labels[1] if labels else place
        lines = names.read_text("utf-8").splitlines() if names.is_file() else []
        found.append(RepositoryModel(place.name, file, [one.strip() for one in lines if one.strip()], why))
    if all(one.left_out for one in found):
        raise BadInput(f"{folder} is no model repository: it has no NAME/VERSION/model.onnx")
    return found


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
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
