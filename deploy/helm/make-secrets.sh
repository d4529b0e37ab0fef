#!/usr/bin/env bash
# Prints the Secrets that values-secured.yaml names, freshly made, for `kubectl apply -f -`:
#
#   deploy/helm/make-secrets.sh tls     NAMESPACE               # an authority, and a certificate for a year
#   deploy/helm/make-secrets.sh mtls    NAMESPACE               # the same, and a certificate of clients: NAME-client-tls
#   deploy/helm/make-secrets.sh tokens  NAMESPACE TENANT...     # a token for each, one for the admin plane
#
# --name NAME before the kind is for a release that is not called vision-encoder. Keys are written to a temporary folder
# and to standard output only. cert-manager or an external store can make the same Secrets.
set -euo pipefail
umask 077

usage() { sed -n 's/^#   //p' "$0" >&2; exit 2; }
name=vision-encoder
if [ "${1:-}" = --name ]; then
    [ $# -ge 2 ] || usage
    name=$2
    shift 2
fi
[ $# -ge 2 ] || usage
kind=$1 namespace=$2
shift 2
[[ $namespace =~ ^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$ ]] || { echo "invalid namespace: $namespace" >&2; exit 2; }
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] || { echo "invalid release name: $name" >&2; exit 2; }

random() { openssl rand -hex 32; }
encoded() { base64 | tr -d '\n'; }

secret() { # NAME TYPE, then lines "key: base64" on standard input
    printf 'apiVersion: v1\nkind: Secret\nmetadata:\n  name: %s\n  namespace: %s\n  labels:\n' "$1" "$namespace"
    printf '    app.kubernetes.io/name: vision-encoder\ntype: %s\ndata:\n' "$2"
    sed 's/^/  /'
}

certificate() { # SECRET COMMON-NAME USES [EXTENSION]; of the authority in $folder
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$2" \
        -keyout "$folder/tls.key" -out "$folder/tls.csr" 2>/dev/null
    printf 'extendedKeyUsage=%s\nbasicConstraints=critical,CA:false\n%s\n' "$3" "${4:-}" >"$folder/ext"
    openssl x509 -req -in "$folder/tls.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" \
        -set_serial "0x$(openssl rand -hex 16)" -days 365 -extfile "$folder/ext" -out "$folder/tls.crt" 2>/dev/null
    for file in ca.crt tls.crt tls.key; do
        printf '%s: %s\n' "$file" "$(encoded <"$folder/$file")"
    done | secret "$1" kubernetes.io/tls
}

case $kind in
tls | mtls)
    [ $# -eq 0 ] || usage
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    names=DNS:localhost
    for service in "$name" "$name-local" "$name-gateway"; do
        names+=,DNS:$service,DNS:$service.$namespace.svc,DNS:$service.$namespace.svc.cluster.local
    done
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=vision-encoder-ca \
        -addext keyUsage=critical,keyCertSign,cRLSign -keyout "$folder/ca.key" -out "$folder/ca.crt" 2>/dev/null
    # The gateway presents the services' certificate to the encoders.
    certificate "$name-tls" vision-encoder "serverAuth,clientAuth" "subjectAltName=$names"
    if [ "$kind" = mtls ]; then
        echo ---
        certificate "$name-client-tls" vision-encoder-client clientAuth
    fi
    ;;
tokens)
    [ $# -ge 1 ] || usage
    lines=
    for tenant in "$@"; do
        [[ $tenant != *[=,[:space:]]* && $tenant != \#* ]] || { echo "invalid tenant name: $tenant" >&2; exit 2; }
        lines+=$tenant=$(random)$'\n'
    done
    {
        printf 'tokens: %s\n' "$(printf '%s' "$lines" | encoded)"
        printf 'admin-token: %s\n' "$(random | tr -d '\n' | encoded)"
    } | secret "$name-tokens" Opaque
    ;;
*) usage ;;
esac
