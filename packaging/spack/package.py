# The recipe of ddprun for Spack. In a checkout of the source, with a repository of your own that has this file as
# packages/ddprun/package.py:   spack dev-build ddprun@main
import os

from spack_repo.builtin.build_systems.meson import MesonPackage

from spack.package import *


class Ddprun(MesonPackage):
    """Launcher and job orchestrator for distributed data-parallel training, with the library for its workers."""

    license("Apache-2.0")

    # Spack takes the source from where you run it: git archive --prefix=ddprun-0.1.0/ -o ddprun-0.1.0.tar.gz HEAD
    manual_download = True

    version("main")
    version("0.1.0")

    variant("pmix", default=True, description="take ranks from a PMIx server")
    variant("tls", default=True, description="encrypt connections between hosts on request (--tls)")
    variant("libfabric", default=True, description="collectives between nodes over libfabric")
    variant("mpi", default=False, description="collectives over MPI")
    variant("cuda", default=False, description="kernels for GPUs")

    depends_on("cxx", type="build")
    depends_on("meson@1.0.1:", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("cli11@2.2:")
    depends_on("fmt")
    depends_on("nlohmann-json")
    depends_on("openblas")
    depends_on("openssl@3:")
    depends_on("spdlog")
    depends_on("cuda", when="+cuda")
    depends_on("libfabric", when="+libfabric")
    depends_on("mpi", when="+mpi")
    depends_on("pmix", when="+pmix")

    conflicts("%gcc@:11", msg="ddprun is C++20: it needs GCC 12 or later")

    def url_for_version(self, version):
        return f"file://{join_path(os.getcwd(), f'ddprun-{version}.tar.gz')}"

    def meson_args(self):
        features = ["pmix", "tls", "libfabric", "mpi", "cuda"]
        return ["-Dtests=false"] + [
            f"-D{name}={'enabled' if self.spec.satisfies('+' + name) else 'disabled'}" for name in features
        ]

    def setup_run_environment(self, env):
        env.prepend_path("MANPATH", self.prefix.share.man)
