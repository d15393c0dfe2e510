#!/usr/bin/env bash
# Deploys the stack of ops/stack.yml, or upgrades it, and waits until everything runs: docs/swarm.md. On a manager of the Swarm:
#
#   IMAGE=registry.example.org/infaas:1 ops/deploy.sh             first deployment: makes the secrets, too
#   IMAGE=registry.example.org/infaas:2 ops/deploy.sh             upgrade, part by part; what fails is taken back, and the exit code is 1
#   ops/deploy.sh --dry-run                                       what would be deployed
#   ops/deploy.sh --check                                         labels and files alone
#
# Settings: variables of the environment, or lines NAME=value of ops/deploy.env (ops/deploy.env.example names them all).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { printf '%5d s  %s\n' "$SECONDS" "$*"; }
fail() {
  printf 'deploy: %s\n' "$*" >&2
  exit 1
}

dry= check=
for word in "$@"; do
  case $word in
  --dry-run) dry=1 ;;
  --check) check=1 ;;
  -h | --help)
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  *) fail "what is $word? There are --dry-run and --check; everything else is a variable" ;;
  esac
done

# What the environment says wins over the file.
if [ -f "${ENV_FILE:=./deploy.env}" ]; then
  while IFS= read -r line || [ -n "$line" ]; do
    case $line in '' | '#'*) continue ;; esac
    name=${line%%=*}
    [[ $line == *=* && $name =~ ^[A-Z][A-Z0-9_]*$ ]] || fail "$ENV_FILE: this is no NAME=value: $line"
    value=${line#*=}
    value=${value#\"} value=${value%\"}
    [ -n "${!name+set}" ] || export "$name=$value"
  done <"$ENV_FILE"
fi

: "${IMAGE:?set IMAGE to the image to deploy, as registry.example.org/infaas:1}"
STACK=${STACK:-infaas} SECRETS=${SECRETS:-./secrets} SETTINGS=${SETTINGS:-./infaas.toml}
TIMEOUT=${TIMEOUT:-600} RESOLVE=${RESOLVE:-always}
[[ $SECRETS == /* || $SECRETS == ./* ]] || SECRETS=./$SECRETS
GPU_IMAGE=${GPU_IMAGE:-$IMAGE} WORKER_IMAGE=$IMAGE DOCKER_SOCKET=${DOCKER_SOCKET:-/var/run/docker.sock}
DOCKER_GID=${DOCKER_GID:-$(stat -c %g "$DOCKER_SOCKET" 2>/dev/null || echo 0)}
files=(-c ./stack.yml)
for file in ${FILES:-}; do
  file=${file#ops/}
  [ -f "$file" ] || fail "FILES names $file, which is not there"
  files+=(-c "$file")
done
export IMAGE STACK SECRETS SETTINGS GPU_IMAGE WORKER_IMAGE DOCKER_SOCKET DOCKER_GID

docker() { command "${DOCKER:-docker}" "$@"; }
in_image() { # PROGRAM ARGS: as we are, in the image, without a network
  docker run --rm --network none --user "$(id -u):$(id -g)" --read-only --tmpfs /tmp --cap-drop ALL --no-healthcheck \
    --volume "$(realpath "$SECRETS"):/secrets" --volume "$(realpath "$SETTINGS"):/etc/infaas/infaas.toml:ro" \
    --workdir /secrets --entrypoint "$1" "$IMAGE" "${@:2}"
}

# ---- is this a manager, and do the nodes say what they are for?

[ "$(docker info --format '{{.Swarm.ControlAvailable}}' 2>/dev/null)" = true ] ||
  fail "the engine is no manager of a Swarm, or does not answer: docker swarm init; or set DOCKER_HOST to a manager's"

nodes_with() { # LABEL [VALUE]: names of the nodes that have it
  docker node ls -q | xargs docker node inspect --format "{{.Description.Hostname}} {{index .Spec.Labels \"$1\"}}" |
    awk -v wanted="${2:-}" '$2 != "" && (wanted == "" || $2 == wanted) { print $1 }'
}
count() { printf '%s' "$1" | grep -c . || true; }
nats=$(count "$(nodes_with infaas.nats true)")
lacks=()
case $nats in
0) lacks+=("infaas.nats: on three nodes (or on one, if a lost machine may take everything with it)") ;;
1) NATS_CONF=single.conf ;;
2) lacks+=("infaas.nats: two nodes have it, and two NATS servers are no better than one; label three") ;;
*) NATS_CONF=cluster.conf ;;
esac
db=$(count "$(nodes_with infaas.db true)")
[ "$db" = 1 ] || lacks+=("infaas.db: on exactly one node, which keeps the database; $db have it")
[ -n "$(nodes_with infaas.gateway true)" ] || lacks+=("infaas.gateway: on at least one node, which serves HTTP and gRPC")
[ -n "$(nodes_with infaas.worker)" ] || [ -n "$(nodes_with infaas.pool)" ] ||
  lacks+=("infaas.worker (a worker runs here; =cpu or =gpu) or infaas.pool (the VM-autoscaler may start one here)")
if [ ${#lacks[@]} -gt 0 ]; then
  printf 'deploy: this label is missing: %s\n' "${lacks[@]}" >&2
  fail "set labels with: docker node update --label-add LABEL=true NODE   (infaas.worker=cpu, infaas.pool=cpu); docker node ls names the nodes"
fi
export NATS_CONF

# ---- secrets, made once and kept in a directory that Git does not see

umask 077
secret() { tr -dc 'A-Za-z0-9' </dev/urandom | head -c 40 || true; }
keep() { # FILE: a random secret is in it
  [ -s "$SECRETS/$1" ] && return
  mkdir -p "$(dirname "$SECRETS/$1")"
  secret >"$SECRETS/$1"
}
dsn() { printf 'postgresql://%s:%s@timescaledb:5432/infaas' "$1" "$(cat "$SECRETS/db/$2_password")"; }
put() { # FILE TEXT: unless it is so already
  [ "$(cat "$SECRETS/$1" 2>/dev/null)" = "$2" ] || printf '%s' "$2" >"$SECRETS/$1"
}

mkdir -p "$SECRETS"
hosts="nats tasks.nats localhost 127.0.0.1 ${BUS_HOSTS:-}"
words=()
for host in $hosts; do words+=(--tls-host "$host"); done
if [ ! -f "$SECRETS/auth/users.json" ]; then
  say "making credentials for the bus in $SECRETS/auth"
  in_image infaas auth init --dir auth "${words[@]}" >/dev/null 2>"$SECRETS/said" || fail "$(cat "$SECRETS/said")"
  printf '%s\n' "$hosts" >"$SECRETS/auth/hosts"
elif [ "$(cat "$SECRETS/auth/hosts" 2>/dev/null)" != "$hosts" ]; then
  say "a new certificate for the NATS servers: $hosts"
  in_image infaas auth certify --dir auth "${words[@]}" >/dev/null 2>"$SECRETS/said" || fail "$(cat "$SECRETS/said")"
  printf '%s\n' "$hosts" >"$SECRETS/auth/hosts"
fi
# an image of before this verb, as in a roll-back, goes on with the rights that are there
in_image infaas auth renew --dir auth 2>"$SECRETS/said" || say "the rights in $SECRETS/auth stay: $(cat "$SECRETS/said")"
rm -f "$SECRETS/said"
for name in db/superuser_password db/writer_password db/reader_password gateway/tokens gateway/operator_tokens engine_token; do
  keep "$name"
done
put db/superuser_dsn "$(dsn postgres superuser)"
put db/writer_dsn "$(dsn infaas_writer writer)"
put db/reader_dsn "$(dsn infaas_reader reader)"

# ---- settings that make no sense would end every service at its start

[ -s "$SETTINGS" ] || fail "$SETTINGS is missing or empty"
code=0
said=$(in_image python -c '
import sys
from pathlib import Path
from services.shell.settings import SettingsError, load
try:
    load(Path("/etc/infaas/infaas.toml"), {})
except SettingsError as error:
    print(error)
    sys.exit(3)
' 2>&1) || code=$?
[ $code != 3 ] || fail "$SETTINGS, which services see as /etc/infaas/infaas.toml: $said" # what else fails, the deployment shows

# ---- secrets and configs bear their content's hash: a changed one is a new one, and who uses it is rolled over

hash_of() { # VARIABLE FILE
  [ -s "$2" ] || fail "$2 is missing or empty"
  export "H_$1=$(sha256sum "$2" | cut -c 1-12)"
}
hash_of SETTINGS "$SETTINGS"
hash_of NATS_CONF "./nats/$NATS_CONF"
hash_of PROMETHEUS ./prometheus/swarm.yml
hash_of PROMETHEUS_RULES ./prometheus/infaas.rules.yml
hash_of CA "$SECRETS/auth/ca.pem"
hash_of NATS_AUTH "$SECRETS/auth/nats-auth.conf"
hash_of NATS_CERTIFICATE "$SECRETS/auth/server.pem"
hash_of NATS_KEY "$SECRETS/auth/server.key"
for user in dispatcher gateway registrar recorder jobs vm-autoscaler supervisor executor monitor dashboard; do
  name=${user^^}
  hash_of "${name//-/_}" "$SECRETS/auth/users/$user.nk"
done
for name in superuser_password writer_password reader_password superuser_dsn writer_dsn reader_dsn; do
  hash_of "DB_${name^^}" "$SECRETS/db/$name"
done
hash_of ENGINE_TOKEN "$SECRETS/engine_token"
hash_of GATEWAY_TOKENS "$SECRETS/gateway/tokens"
hash_of GATEWAY_OPERATOR_TOKENS "$SECRETS/gateway/operator_tokens"

# ---- what runs already stays as it is: numbers set by hand, and NATS' image, which an upgrade of ours is no reason to change

inspect() { docker service inspect --format "$2" "${STACK}_$1" 2>/dev/null | head -n 1 || true; }
for service in dispatcher recorder prometheus; do
  variable=${service^^}_REPLICAS
  [ -n "${!variable:-}" ] || export "$variable=$(inspect "$service" '{{.Spec.Mode.Replicated.Replicas}}')"
  [ -n "${!variable}" ] || unset "$variable"
done
NATS_IMAGE=${NATS_IMAGE:-$(inspect nats '{{.Spec.TaskTemplate.ContainerSpec.Image}}')}
export NATS_IMAGE=${NATS_IMAGE:-$IMAGE}

if [ -n "$check" ]; then
  say "labels and files are in order: $nats NATS, image $IMAGE"
  exit 0
fi
if [ -n "$dry" ]; then
  docker stack config "${files[@]}" 2>/dev/null && exit 0
  echo "# this client has no \`docker stack config\`; the files and variables are:"
  printf '# %s\n' "${files[@]}"
  export -p | sed -n 's/^declare -x \(\(IMAGE\|.*_IMAGE\|STACK\|H_.*\|.*_REPLICAS\|NATS_CONF\|SECRETS\|SETTINGS\)=\)/\1/p'
  exit 0
fi

# ---- deploy, and wait

services() { docker service ls --filter "label=com.docker.stack.namespace=$STACK" --format '{{.Name}} {{.Replicas}}' | sort; }
state_of() { docker service inspect --format '{{if .UpdateStatus}}{{.UpdateStatus.State}} {{.UpdateStatus.Message}}{{end}}' "$1"; }
why() { # SERVICE [WORDS]: what its last tasks died of, or the one that the words name
  local task
  task=$(grep -oE '\b[a-z0-9]{25}\b' <<<"${2:-}" | head -n 1 || true)
  if [ -z "$task" ]; then
    docker service ps --no-trunc --format '{{.Name}} on {{.Node}}: {{.CurrentState}} {{.Error}}' "$1" |
      grep -E ': (Failed|Rejected|Pending|Preparing|Starting|Complete)' | sort -u | head -n 3 | sed 's/^/         /' || true
    task=$(docker service ps -q --no-trunc --filter desired-state=shutdown "$1" | head -n 1)
  else
    docker inspect --format '         {{.Status.State}}: {{.Status.Err}}' "$task" || true
  fi
  [ -n "$task" ] || return 0
  timeout 10 "${DOCKER:-docker}" service logs --raw --tail 3 "$task" 2>&1 | cut -c 1-400 | sed 's/^/         | /' || true
}

roll() { # WHAT [pass]: deploy the files with the variables as they are now, and wait until all of it runs, or as a pass all updates have ended
  say "deploying $1"
  local printed tries=0
  until printed=$(docker stack deploy --with-registry-auth --prune --resolve-image "$RESOLVE" "${files[@]}" "$STACK" 2>&1 >/dev/null); do
    # Swarm has changed a service in the same moment, as where it takes an update back: once more.
    [[ $printed == *'update out of sequence'* && $((tries += 1)) -lt 10 ]] && sleep 1 && continue
    printf '%s\n' "$printed" >&2
    fail "docker stack deploy has failed"
  done
  [ -z "$printed" ] || grep -v -e '--detach=false' -e '^In a future release' <<<"$printed" >&2 || true

  local name replicas rest state doing line missing told='' next=0 quiet=0
  while :; do
    missing=() line=''
    while read -r name replicas rest; do
      state=$(state_of "$name")
      case $state in
      rollback_* | paused*)
        printf 'deploy: %s: %s\n' "${name#"${STACK}"_}" "$state" >&2
        why "$name" "$state" >&2
        case $state in rollback_started*) doing='is going back to what it was' ;; paused*) doing='has stopped half way' ;; *) doing='is what it was' ;; esac
        fail "the update of ${name#"${STACK}"_} failed and $doing; other services may have $IMAGE already: mend it, or deploy the image before"
        ;;
      updating*) missing+=("$name") line+="  ${name#"${STACK}"_} ${replicas} (updating)" ;;
      *)
        case "$replicas $rest" in # more than wanted: some are on a machine that is gone
        *"(1/1 completed)"*) ;;
        *completed*) missing+=("$name") line+="  ${name#"${STACK}"_}" ;;
        *) [ -n "${2:-}" ] || [ "${replicas%/*}" -ge "${replicas#*/}" ] || { missing+=("$name") && line+="  ${name#"${STACK}"_} ${replicas}"; } ;;
        esac
        ;;
      esac
    done < <(services)
    if [ "$line" != "$told" ] && [ "$SECONDS" -ge "$next" ] && [ -n "$line" ]; then
      say "waiting for:$line"
      told=$line next=$((SECONDS + 5))
    fi
    if [ ${#missing[@]} = 0 ]; then
      quiet=$((quiet + 1))
      [ $quiet -lt 3 ] || break # what has only just been ordered has had the time to begin
    else
      quiet=0
    fi
    if [ "$SECONDS" -ge "$TIMEOUT" ]; then
      for name in "${missing[@]}"; do
        printf 'deploy: %s:\n' "${name#"${STACK}"_}" >&2
        why "$name" >&2
      done
      fail "not everything runs after $TIMEOUT s:$line"
    fi
    sleep 1
  done
}

# Not everything at once. While tasks of other services come to a node and go, Swarm may replace that node's task of a global service at
# once, whatever the order and number that its update is to keep. So NATS is changed alone, and workers after all others.
plain() { printf '%s' "${1%@*}"; } # an image without the digest that Swarm has added
before=$(plain "$(inspect worker-cpu '{{.Spec.TaskTemplate.ContainerSpec.Image}}')")
others=$(plain "$(inspect dispatcher '{{.Spec.TaskTemplate.ContainerSpec.Image}}')")
gpu=$(plain "$(inspect worker-gpu '{{.Spec.TaskTemplate.ContainerSpec.Image}}')")
servers=$(inspect nats '{{range .Spec.TaskTemplate.ContainerSpec.Configs}}{{.ConfigName}} {{end}}')
if [ -n "$before" ] && [ "$before $others $gpu" != "$WORKER_IMAGE $IMAGE $GPU_IMAGE" ]; then
  wanted=("$IMAGE" "$GPU_IMAGE")
  WORKER_IMAGE=$before GPU_IMAGE=${gpu:-$before}
  changed=
  for name in "nats_auth_$H_NATS_AUTH" "nats_certificate_$H_NATS_CERTIFICATE" "nats_conf_$H_NATS_CONF"; do
    [[ $servers == *"$name"* ]] || changed=1
  done
  if [ -n "$changed" ]; then
    IMAGE=$others
    roll "$others as $STACK with the new credentials and settings" pass
  fi
  IMAGE=${wanted[0]}
  roll "$IMAGE as $STACK, all but the workers" pass
  WORKER_IMAGE=${wanted[0]} GPU_IMAGE=${wanted[1]}
fi
roll "$IMAGE as $STACK"

# Secrets and configs that no service has now, nor would go back to.
used=$(docker service ls -q --filter "label=com.docker.stack.namespace=$STACK" | xargs docker service inspect)
for kind in secret config; do
  docker "$kind" ls --filter "label=com.docker.stack.namespace=$STACK" --format '{{.Name}}' | while read -r name; do
    grep -qF "\"$name\"" <<<"$used" || docker "$kind" rm "$name" >/dev/null 2>&1 || true
  done
done
say "$STACK runs $IMAGE; the gateway is at port ${GATEWAY_PORT:-8000} of: $(nodes_with infaas.gateway true | paste -sd ' ')"
