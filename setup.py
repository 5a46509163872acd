"""The one part of packaging that cannot be declared: data files go next to the packages. All else is in pyproject.toml
and setup.cfg."""

from setuptools import Distribution, setup


# isort: split
# Setuptools, once imported, brings distutils along.
from distutils.command.install_data import install_data


class NextToPackages(install_data):
    """Installs data files into the folder of packages."""

    def finalize_options(self) -> None:
        self.set_undefined_options("install", ("install_purelib", "install_dir"), ("root", "root"), ("force", "force"))


class WithData(Distribution):
    """A distribution with data files in editable installations, too: setuptools asks for them by this name there."""

    def has_data(self) -> bool:
        return bool(self.data_files)


setup(cmdclass={"install_data": NextToPackages}, distclass=WithData)
