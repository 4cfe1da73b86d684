#!/usr/bin/env bash
# A Slurm of two nodes on this one machine, to try `srun` for real: munge, slurmctld and two slurmd, loopback only.
# Its nodes n1 and n2 are no names that a resolver knows, hence MASTER_ADDR; on a real cluster leave it out.
#
#     sudo scripts/slurm_one_host.sh up FOLDER      # starts it; its files lie in FOLDER
#     SLURM_CONF=FOLDER/slurm.conf MASTER_ADDR=127.0.0.1 srun -N2 .venv/bin/python loop.py
#     sudo scripts/slurm_one_host.sh down FOLDER
#
# Needs root and Debian's packages slurm-wlm and munge, which `up` installs where they are missing.
set -euo pipefail

action=${1:-}
folder=${2:-}
if [[ -z $folder || ($action != up && $action != down) ]]; then
    echo "usage: $0 up|down FOLDER" >&2
    exit 2
fi

down() {
    local pidfile
    for pidfile in "$folder"/*.pid; do
        [[ -f $pidfile ]] && kill "$(cat "$pidfile")" 2>/dev/null || true
    done
}

up() {
    if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
        apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq slurm-wlm munge
    fi
    mkdir -p "$folder"
    folder=$(cd "$folder" && pwd)
    local host cores
    host=$(hostname -s)
    cores=$(nproc)
    install -d -o munge -g munge -m 0755 /run/munge
    pgrep -x munged >/dev/null || runuser -u munge -- munged
    cat >"$folder/slurm.conf" <<CONF
ClusterName=stretto
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17000
SlurmctldParameters=enable_configless
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmdSpoolDir=$folder/spool.%n
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17001 CPUs=$cores
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17002 CPUs=$cores
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
    mkdir -p "$folder/state" "$folder/spool.n1" "$folder/spool.n2"
    slurmctld -f "$folder/slurm.conf"
    slurmd -f "$folder/slurm.conf" -N n1
    slurmd -f "$folder/slurm.conf" -N n2
    for _ in $(seq 50); do
        if SLURM_CONF="$folder/slurm.conf" sinfo -h -o %T 2>/dev/null | grep -qx idle; then
            echo "up: SLURM_CONF=$folder/slurm.conf MASTER_ADDR=127.0.0.1 srun -N2 COMMAND"
            return
        fi
        sleep 0.2
    done
    echo "$0: the nodes did not come up; see $folder/*.log" >&2
    exit 1
}

"$action"
