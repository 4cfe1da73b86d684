#!/usr/bin/env bash
# Two hosts on this one machine, joined by a link of known speed: network namespaces stretto0 (10.77.0.1) and stretto1
# (10.77.0.2), a veth pair, and a token bucket at both ends. What passes between them touches no other network.
#
#     sudo scripts/two_hosts.sh up [RATE]      # RATE as tc has it, such as 100mbit (the default) or 1gbit
#     sudo ip netns exec stretto0 COMMAND
#     sudo scripts/two_hosts.sh down
#
# Needs root, and Debian's package iproute2.
set -euo pipefail

action=${1:-}
rate=${2:-100mbit}
if [[ $action != up && $action != down ]]; then
    echo "usage: $0 up|down [RATE]" >&2
    exit 2
fi

down() {
    local number
    for number in 0 1; do
        ip netns del "stretto$number" 2>/dev/null || true # and with it its end of the pair
    done
}

up() {
    local number
    down
    trap down ERR
    for number in 0 1; do ip netns add "stretto$number"; done
    ip link add stretto0 netns stretto0 type veth peer name stretto1 netns stretto1
    for number in 0 1; do
        ip -n "stretto$number" address add "10.77.0.$((number + 1))/24" dev "stretto$number"
        ip -n "stretto$number" link set lo up
        ip -n "stretto$number" link set "stretto$number" up
        tc -n "stretto$number" qdisc replace dev "stretto$number" root tbf rate "$rate" burst 256kb latency 50ms
    done
    echo "up at $rate: stretto doctor --hosts stretto0=10.77.0.1,stretto1=10.77.0.2 --reach 'ip netns exec {host}'"
}

"$action"
