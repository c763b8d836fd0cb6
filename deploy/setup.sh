#!/bin/sh
# Install what `ray up` has brought to this machine: AlignedServe from ~/alignedserve/dist, all else by the locks.
#     setup.sh [PACKAGE...]        more packages of pip, such as boto3
set -eu
cd "$HOME/alignedserve"
# Triton compiles by a C compiler, with Python.h. Where nobody here may install them, the preflight of `serve` says so.
if ! command -v gcc > /dev/null || ! python3 -c 'import ensurepip, sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2> /dev/null; then
  as_root=; [ "$(id -u)" = 0 ] || as_root="sudo -n"
  ($as_root apt-get update -q && $as_root apt-get install -qy gcc libc6-dev python3-dev python3-venv) > setup.log 2>&1 || true
fi
python3 -m venv venv
locked() { venv/bin/pip install --quiet --no-deps --require-hashes -r "deploy/locks/$1" ${2:+--index-url "$2"}; }
if ! venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then  # the locks are for 3.11 and newer
  venv/bin/pip install --quiet torch==2.13.0 "$(ls dist/alignedserve-*.whl)[ray,redis]"
else
  if [ -e /dev/nvidiactl ]; then
    locked torch-cuda.txt
    locked image-cuda.txt || echo "without FlashAttention 3: ours attends alone"
  else  # that of the usual index computes on CPUs too, and is larger
    locked torch-cpu.txt 2> /dev/null || locked torch-cpu.txt https://download.pytorch.org/whl/cpu || locked torch-cuda.txt
  fi
  locked serve.txt
  locked image.txt
fi
venv/bin/pip install --quiet --no-deps --force-reinstall dist/alignedserve-*.whl
[ $# = 0 ] || venv/bin/pip install --quiet "$@"
# `ray down` and `ray exec` look for ray where a login does.
grep -qs alignedserve ~/.bashrc || echo '. ~/alignedserve/deploy/env.sh' >> ~/.bashrc
