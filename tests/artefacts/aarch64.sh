#!/bin/bash
# The package for aarch64: a wheel with the native half cross-compiled, its glibc checked, and tests of
# it under emulation by Debian's Python for that architecture. Nothing is installed: packages are
# unpacked under .cache/aarch64.
#
#     tests/artefacts/aarch64.sh PYTHON AUDITWHEEL-FOLDER
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$PWD/$1
tools=$PWD/$2
here=$PWD/.cache/aarch64
tests=$PWD/tests

for tool in aarch64-linux-gnu-gcc qemu-aarch64-static apt-get dpkg-deb; do
    if ! command -v "$tool" > /dev/null; then
        echo "not run: no $tool; on Debian: apt-get install" \
            "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"
        exit
    fi
done

if ! cmp -s tests/artefacts/aarch64.txt "$here/made-of.txt"; then
    rm -rf "$here"
    mkdir -p "$here"/{lists/partial,archives/partial,debs,root}
    touch "$here/status"
    apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root
        -o Dir::State::lists="$here/lists" -o Dir::State::status="$here/status"
        -o Dir::Cache="$here")
    "${apt[@]}" update
    (cd "$here/debs" && "${apt[@]}" download python3.11-minimal libpython3.11-minimal \
        libpython3.11-stdlib libc6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libuuid1 \
        libgcc-s1 libstdc++6 libcrypt1)
    for package in "$here"/debs/*.deb; do dpkg-deb -x "$package" "$here/root"; done
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        --python-version 3.11 --implementation cp --target "$here/site" -r tests/artefacts/aarch64.txt
    rm -r "$here"/{lists,archives,debs,status}
    cp tests/artefacts/aarch64.txt "$here/made-of.txt"
fi

# The sources are copied, so that nothing of this machine's build comes along.
rm -rf "$here"/{source,wheel,tree} && mkdir -p "$here"/{source,tree}
cp -r pyproject.toml setup.py README.md LICENSE fused_slots "$here/source"
find "$here/source" -name '*.so' -delete
_PYTHON_HOST_PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc LDSHARED='aarch64-linux-gnu-gcc -shared' \
    "$python" -m build --wheel --no-isolation --outdir "$here/wheel" "$here/source" > "$here/build.log" ||
    { cat "$here/build.log"; exit 1; }
PATH="$tools:$PATH" auditwheel repair -w "$here/wheel" \
    "$here"/wheel/*-cp311-abi3-linux_aarch64.whl
"$python" -m tests.artefacts.contents "$here"/wheel/*manylinux_2_17_aarch64.whl
"$python" -m zipfile -e "$here"/wheel/*manylinux_2_17_aarch64.whl "$here/tree"

# Left out: tests that start a process or a compiler, and two that take a minute under emulation.
cp -r "$tests" pyproject.toml "$here/tree"
cd "$here/tree"
PYTHONPATH="$here/site" qemu-aarch64-static -L "$here/root" \
    "$here/root/usr/bin/python3.11" -m pytest -p tests.artefacts.emulated -p no:cacheprovider \
    tests/test_host_halves.py tests/test_block_tables.py \
    -k 'not nothing_was_compiled and not compiler_is and not any_calls and not many_steps'
