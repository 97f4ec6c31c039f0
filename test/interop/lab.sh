# shellcheck shell=bash
# The virtual machines of the interop run: Debian's kernel with its soft-iWARP (siw) in four builds, and Debian's
# RDMA tools, in an initramfs. Sourced, after harness.sh, by the runs that have a guest.
#
#   lab_build            makes the pieces in $LAB unless they are there: about two minutes, and network for apt
#   vm_start NAME NETNS TAP ADDR/LEN BUILD PCAP    boots a guest on TAP; every frame of TAP goes to PCAP
#   vm_wait NAME         returns when its siw0 is up, of the third guest at the latest
#   vm_do NAME SECONDS CMD    runs CMD (one line of sh) in the guest, prints its output, returns its status
#   vm_stop NAME
#
# What is booted is in variables: VM_QEMU (the emulator, and its arguments), VM_KERNEL, VM_INITRD (such as lab_overlay
# makes), VM_MEM (MiB), VM_SMP, VM_DEVICE (the NIC, as -device takes it) and VM_TAP (properties of the tap).
#
# Builds: default, crc (asks for CRC), p2p (asks for peer-to-peer set-up, RFC 6581), rev1 (MPA revision 1). They are
# compile-time constants in siw.
#
# Plain emulation by default: nested KVM cannot be relied on. SIW_LAB_ACCEL=kvm changes that.
#
# maxcpus=2 of VM_SMP: where there can be but one CPU, QEMU 7.2 leaves the guest's memory barriers out, and its own threads, which
# run beside that CPU, miss what is in a queue of virtio: the guest's network stands still ("transmit queue 0 timed out").
#
# no_timer_check: on a loaded machine the guest finds too few ticks in the time it gives its timer, and panics.
#
# The frames are captured by QEMU, at the tap's far end: an AF_PACKET capture on the tap sees neither what XDP takes
# (generic XDP runs before the packet taps) nor what an AF_XDP socket sends. vnet_hdr=off keeps virtio headers out of the file.

LAB=${SIW_LAB_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/siw-lab}
declare -A VM_PID VM_FD VM_ARGS
VM_QEMU=(qemu-system-x86_64) VM_KERNEL=$LAB/vmlinuz VM_INITRD='' VM_MEM=768 VM_SMP=1,maxcpus=2 VM_TAP=vnet_hdr=off
VM_DEVICE=virtio-net-pci,csum=off,gso=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ufo=off,host_tso4=off,host_tso6=off,mrg_rxbuf=off

lab_ready() { [ -s "$LAB/initrd.gz" ] && [ -s "$LAB/vmlinuz" ]; }

lab_build() {
  lab_ready && return
  echo "interop: building the virtual machine in $LAB (once)"
  local new=$LAB.$$ pkg kver v
  rm -rf "$new"; mkdir -p "$new/kernel" "$new/src"
  apt update || true   # first: an old list may name a kernel whose headers are gone
  pkg=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\)$/\1/p' | head -1)
  kver=${pkg#linux-image-}
  apt_install qemu-system-x86 busybox-static kmod cpio xz-utils gcc make "linux-headers-$kver" linux-source rdma-core \
    ibverbs-utils ibverbs-providers rdmacm-utils perftest qperf libfabric-bin iproute2 ethtool iperf3 tcpdump \
    nfs-common netbase libtirpc-common
  (cd "$new" && apt-get -o Acquire::Retries=5 download "$pkg" >/dev/null 2>&1 && dpkg -x "$pkg"_*.deb kernel && rm -f "$pkg"_*.deb)
  tar -C "$new/src" --strip-components=1 --wildcards -xf /usr/src/linux-source-*.tar.xz '*/drivers/infiniband/sw/siw/*'
  for v in default crc p2p rev1; do
    cp -r "$new/src/drivers/infiniband/sw/siw" "$new/siw-$v"
    case $v in
      crc)  sed -i 's/^const bool mpa_crc_required;/const bool mpa_crc_required = true;/' "$new/siw-$v/siw_main.c" ;;
      p2p)  sed -i 's/^const bool peer_to_peer;/const bool peer_to_peer = true;/' "$new/siw-$v/siw_main.c" ;;
      rev1) sed -i 's/^u_char mpa_version = MPA_REVISION_2;/u_char mpa_version = MPA_REVISION_1;/' "$new/siw-$v/siw_main.c" ;;
    esac
    [ "$v" = default ] || ! cmp -s "$new/siw-$v/siw_main.c" "$new/siw-default/siw_main.c" ||
      { echo "interop: siw's source has changed: no $v build of it" >&2; return 1; }
    make -s -C "/lib/modules/$kver/build" M="$new/siw-$v" CONFIG_RDMA_SIW=m modules >"$new/siw-$v.log" 2>&1 ||
      { tail -5 "$new/siw-$v.log" >&2; return 1; }
  done
  lab_initrd "$new" "$kver"
  cp "$new/kernel/boot/vmlinuz-$kver" "$new/vmlinuz"
  rm -rf "$LAB"; mv "$new" "$LAB"
}

apt() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 "$@" >/dev/null 2>"$TMP/apt.err" ||
    { cat "$TMP/apt.err" >&2; return 1; }
}

apt_install() { apt install -y --no-install-recommends "$@"; }

# initrd_begin R PROGRAM...: the folders of an initramfs, with busybox and these programs.
initrd_begin() {
  local R=$1 b
  shift
  mkdir -p "$R"/{bin,sbin,proc,sys,dev,tmp,etc,lib64,usr/bin,usr/sbin,run,mnt}
  cp /bin/busybox "$R/bin/"
  for b in $(/bin/busybox --list | grep -vxE 'busybox|ip|tc|modprobe|insmod|lsmod|depmod'); do ln -sf busybox "$R/bin/$b"; done
  initrd_programs "$R" kmod ip tc ethtool "$@"
  for b in modprobe insmod lsmod depmod; do ln -sf /usr/bin/kmod "$R/sbin/$b"; done
  echo 'root:x:0:0:root:/:/bin/sh' >"$R/etc/passwd"; echo '127.0.0.1 localhost' >"$R/etc/hosts"
}

# initrd_programs R PROGRAM...: adds these programs of the machine, as far as it has them, and their libraries.
initrd_programs() {
  local R=$1 b l
  shift
  for b; do
    b=$(PATH=$PATH:/sbin:/usr/sbin command -v "$b") || continue
    b=$(readlink -f "$b" | sed 's#^/s\?bin#/usr&#')
    cp --parents "$b" "$R/"
    ldd "$b" 2>/dev/null | grep -o '/[^ ]*' | while read -r l; do cp -n --parents -L "$l" "$R/" || true; done
  done
}

# initrd_end R FROM RELEASE FILE: packs it into FILE, with the lists of the modules of the folder FROM.
initrd_end() {
  cp "$2"/modules.{order,builtin,builtin.modinfo} "$1/lib/modules/$3/"
  depmod -b "$1" "$3"
  chmod +x "$1/init"
  (cd "$1" && find . | cpio -o -H newc 2>/dev/null | gzip -1) >"$4"
}

lab_initrd() {
  local new=$1 kver=$2 R=$1/root S M d v
  initrd_begin "$R" rping ucmatose rcopy riostream rstream ib_send_bw ib_write_bw ib_read_bw ib_send_lat ib_write_lat ib_read_lat \
    ibv_devices ibv_devinfo ibv_rc_pingpong rdma qperf fi_pingpong fi_info iperf3 tcpdump mount.nfs
  mkdir -p "$R"/{etc/libibverbs.d,usr/lib/x86_64-linux-gnu/libibverbs,siw}
  cp -n --parents -L /lib/x86_64-linux-gnu/libgcc_s.so.1 "$R/" || true   # loaded by pthread_cancel, which ldd cannot know
  cp /usr/lib/x86_64-linux-gnu/libibverbs/libsiw* "$R/usr/lib/x86_64-linux-gnu/libibverbs/"
  cp /etc/libibverbs.d/siw.driver "$R/etc/libibverbs.d/"
  S=$new/kernel/lib/modules/$kver/kernel; M=$R/lib/modules/$kver/kernel; mkdir -p "$M"
  for d in drivers/infiniband/core drivers/infiniband/ulp drivers/virtio drivers/net/virtio_net.ko drivers/net/veth.ko \
           drivers/net/net_failover.ko net/core arch/x86/crypto crypto lib net/sunrpc net/sctp net/ipv4/udp_tunnel.ko \
           net/ipv6/ip6_udp_tunnel.ko net/sched fs/configfs fs/nfs fs/nfsd fs/lockd fs/nfs_common fs/fscache fs/netfs \
           net/dns_resolver drivers/nvme drivers/block/loop.ko drivers/scsi drivers/target; do
    (cd "$S" && [ -e "$d" ] && cp -r --parents "$d" "$M/") || true
  done
  for v in default crc p2p rev1; do cp "$new/siw-$v/siw.ko" "$R/siw/$v.ko"; done
  cp /etc/netconfig /etc/protocols /etc/services /etc/rpc "$R/etc/" 2>/dev/null || true
  cat >"$R/init" <<'I'
#!/bin/sh
export PATH=/sbin:/bin:/usr/sbin:/usr/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp; mount -t tmpfs run /run
modprobe virtio_pci; modprobe virtio_net
ulimit -l unlimited
ip link set lo up
for a in $(cat /proc/cmdline); do case $a in ipaddr=*) IP=${a#ipaddr=};; siw=*) SIW=${a#siw=};; prep=*) PREP=${a#prep=};; run=*) RUN=${a#run=};; mtu=*) ip link set eth0 mtu ${a#mtu=};; esac; done
ip link set eth0 up; case $IP in *:*) ip addr add $IP dev eth0 nodad;; *) ip addr add $IP dev eth0;; esac
[ -n "$PREP" ] && sh -c "$(echo $PREP | base64 -d)"
modprobe rdma_ucm; modprobe ib_uverbs; modprobe libcrc32c; insmod /siw/${SIW:-default}.ko
mdev -s 2>/dev/null
rdma link add siw0 type siw netdev eth0
echo "siw-lab: guest ready"
sh -c "$(echo $RUN | base64 -d)"; echo "siw-lab: exit $?"
poweroff -f
I
  initrd_end "$R" "$new/kernel/lib/modules/$kver" "$kver" "$new/initrd.gz"
}

# lab_overlay DIR [INITRD]: the path of an initramfs with the files of DIR besides.
lab_overlay() {
  (cd "$1" && find . | cpio -o -H newc 2>/dev/null | gzip -1) | cat "${2:-$LAB/initrd.gz}" - >"$TMP/initrd.gz"
  echo "$TMP/initrd.gz"
}

vm_start() {
  local name=$1 ns=$2 tap=$3 addr=$4 build=$5 pcap=$6 fd mac
  VM_ARGS[$name]=${*@Q}
  # The guest's shell is driven over the serial line: one command a line, answered by "@@ number status".
  local shell='stty -echo; while read -r N L; do eval "$L" </dev/null 2>&1; echo "@@ $N $?"; done'
  mac=52:54:00:$(printf '%s' "$tap" | md5sum | sed 's/\(..\)\(..\)\(..\).*/\1:\2:\3/')
  mkfifo "$TMP/$name.in"
  exec {fd}<>"$TMP/$name.in"
  ip netns exec "$ns" nice -n -15 "${VM_QEMU[@]}" -accel "${SIW_LAB_ACCEL:-tcg,thread=multi}" -cpu max -m "$VM_MEM" -smp "$VM_SMP" -display none \
    -serial stdio -monitor none -no-reboot -kernel "$VM_KERNEL" -initrd "${VM_INITRD:-$LAB/initrd.gz}" \
    -append "console=ttyS0 quiet loglevel=3 panic=-1 no_timer_check ipaddr=$addr siw=$build run=$(printf '%s' "$shell" | base64 -w0)" \
    -netdev "tap,id=n0,ifname=$tap,script=no,downscript=no,vhost=off,$VM_TAP" ${pcap:+-object filter-dump,id=d0,netdev=n0,file=$pcap} \
    -device "$VM_DEVICE,romfile=,mac=$mac,netdev=n0" <&"$fd" >"$TMP/$name.console" 2>&1 &
  VM_PID[$name]=$! VM_FD[$name]=$fd
}

# vm_wait NAME: until the guest is ready. One that dies at its start, or that stands still (emulated processors on a busy
# machine do), is replaced, and that is said.
vm_wait() {
  local name=$1 try args
  for try in 1 2 3; do
    ! wait_for $((60 + 60 * try)) "${VM_PID[$name]}" grep -qs "guest ready" "$TMP/$name.console" || return 0
    tail -5 "$TMP/$name.console" | tr -d '\r' | cut -c 1-160 >&2
    [ "$try" -lt 3 ] || return 1
    echo "interop: $name did not start: once more, with a new one" >&2
    vm_stop "$name"
    eval "args=(${VM_ARGS[$name]})"
    vm_start "${args[@]}"
  done
}

vm_do() {
  local name=$1 n=${EPOCHREALTIME/./} console=$TMP/$1.console from
  from=$(stat -c %s "$console")
  echo "$n $3" >&"${VM_FD[$name]}"
  if ! wait_for "$2" "${VM_PID[$name]}" grep -qs "^@@ $n " "$console"; then
    tail -c +$((from + 1)) "$console" | tr -d '\r'
    echo "no answer from the guest in $2 s"
    return 124
  fi
  tail -c +$((from + 1)) "$console" | tr -d '\r' | sed "/^@@ $n /,\$d"
  return "$(tr -d '\r' <"$console" | sed -n "s/^@@ $n //p")"
}

vm_stop() {
  local pid=${VM_PID[$1]:-} fd=${VM_FD[$1]:-}
  [ -n "$pid" ] || return 0
  kill "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
  exec {fd}>&-
  rm -f "$TMP/$1.in"
  unset "VM_PID[$1]" "VM_FD[$1]"
}
