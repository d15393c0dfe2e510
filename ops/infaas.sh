#!/usr/bin/env bash
# A command of infaas as the operator of the stack, from a manager: ops/infaas.sh workers, ops/infaas.sh status, ops/infaas.sh sql "SELECT …".
# Files that it reads lie in the present directory, which it sees as /here (it begins there).
set -euo pipefail
here=$(pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"
STACK=${STACK:-infaas} SECRETS=$(realpath "${SECRETS:-./secrets}") USER_NAME=${USER_NAME:-operator}
IMAGE=${IMAGE:-$(docker service inspect --format '{{.Spec.TaskTemplate.ContainerSpec.Image}}' "${STACK}_dispatcher")}
tty=()
[ ! -t 0 ] || [ ! -t 1 ] || tty=(--tty)
network=${STACK}_bus
[ "${1:-}" != sql ] || network=${STACK}_db
exec docker run --rm --interactive "${tty[@]}" --network "$network" --user "$(id -u):$(id -g)" --read-only --tmpfs /tmp \
  --cap-drop ALL --no-healthcheck --volume "$here:/here" --workdir /here \
  --volume "$SECRETS/auth/users/$USER_NAME.nk:/run/secrets/nkey:ro" --volume "$SECRETS/auth/ca.pem:/run/secrets/ca.pem:ro" \
  --env INFAAS_NATS_URL=tls://nats:4222 --env INFAAS_NKEY_SEED=/run/secrets/nkey --env INFAAS_TLS_CA=/run/secrets/ca.pem \
  --env "INFAAS_SQL_DSN=$(cat "$SECRETS/db/reader_dsn")" "$IMAGE" "$@"
