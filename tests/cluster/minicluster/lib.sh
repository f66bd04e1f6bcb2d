# Shared by the scripts beside it; sourced, never run. Knows how to become root, how to call apt
# without blocking for ever and without apt starting any daemon. Knows nothing of Slurm or images.
# A script that is no part of the cluster sets `speaker` to its own name.
# shellcheck shell=bash

say() { printf '%s: %s\n' "${speaker:-minicluster}" "$*" >&2; }
die() { say "$*"; exit 1; }

# as_root CMD...: as root, or through sudo where it asks for no password.
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n -- "$@"; fi
}

can_be_root() {
  [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }
}

# apt_get ARGS...: bounded, patient with a lock and with a flaky mirror. While it runs, packages
# may not start their daemons: policy-rc.d says no, and goes away again unless it was there before.
apt_get() {
  local policy=/usr/sbin/policy-rc.d ours=0 rc=0
  if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' | as_root tee $policy >/dev/null
    as_root chmod 755 $policy
    ours=1
  fi
  as_root timeout 900 env DEBIAN_FRONTEND=noninteractive apt-get -qq \
    -o DPkg::Lock::Timeout=300 -o Acquire::Retries=5 -o Dpkg::Use-Pty=0 "$@" </dev/null || rc=$?
  [ $ours = 0 ] || as_root rm -f $policy
  return $rc
}

# apt_install PACKAGE...: only what is missing; refreshes the lists when the first try fails.
apt_install() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
      missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  can_be_root || die "needs ${missing[*]}; install them with apt, or give passwordless sudo"
  apt_get install -y --no-install-recommends "${missing[@]}" >/dev/null 2>&1 && return 0
  apt_get update >/dev/null || say "apt-get update failed; trying with the lists at hand"
  apt_get install -y --no-install-recommends "${missing[@]}" >/dev/null
}

# The mirror this machine already uses.
apt_mirror() {
  {
    sed -n 's/^URIs:[[:space:]]*\([^[:space:]]*\).*/\1/p' /etc/apt/sources.list.d/*.sources
    sed -n 's/^deb[[:space:]].*\(https\{0,1\}:[^[:space:]]*\).*/\1/p' /etc/apt/sources.list
  } 2>/dev/null | grep -i '/debian/\{0,1\}$' | head -n 1 || true
}
