"""The one part that is compiled; everything else is in pyproject.toml.

A plain shared library, called through ctypes: it uses nothing of Python, so one build serves every version. Without a C compiler
the installation goes on, and numpy does the same work more slowly (``milesbatch doctor`` says which one is there).
"""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class SharedLibrary(build_ext):
    """Builds a library that is no Python module: there is no initialising function to export."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)


setup(
    ext_modules=[
        Extension(
            "milesbatch.weights._steps",
            ["milesbatch/weights/native/steps.c"],
            depends=["milesbatch/weights/native/lists.h", "milesbatch/weights/native/loops.h"],
            extra_compile_args=["-O2", "-fno-tree-slp-vectorize"],
            py_limited_api=True,
            libraries=["m"],
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_ext": SharedLibrary},
)
