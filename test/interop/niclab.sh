# shellcheck shell=bash
# The virtual machine of the run nic: the newest kernel of Debian, and a QEMU that has the NICs of real drivers. Sourced, after
# lab.sh, whose vm_* functions boot it and run commands in it.
#
#   nic_lab_build     makes the pieces in $NIC_LAB unless they are there: about a minute, and network for apt
#   nic_lab_use NIC   sets the variables of vm_start for a guest with that NIC, which is its eth0
#
# NIC is virtio (virtio-net as most hosts have it), virtio-zc (behind an IOMMU, as its AF_XDP zero copy needs it), virtio-old (without
# merged buffers), igb (Intel 82576), e1000e (Intel 82574), vmxnet3 (VMware), or another device of QEMU: e1000, rtl8139, tulip.
#
# Plain emulation: right for whether something works, wrong for how fast.

NIC_LAB=${NIC_LAB_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/nic-lab}

# Modules of the guest: names of files, as an extended regular expression.
NIC_MODULES='virtio|virtio_(net|pci|pci_modern_dev|pci_legacy_dev|ring)|net_failover|failover|igb|e1000e|e1000|vmxnet3|8139cp|8139too|tulip|mii|mdio'
NIC_MODULES+='|8021q|garp|mrp|stp|llc|veth|dummy|i2c-algo-bit|dca|ptp|pps_core|crc32c.*|libcrc32c|xsk_diag|hwmon|bridge|bonding|tls|macvlan|macvtap|tap|ipvlan|vxlan|geneve|udp_tunnel|ip6_udp_tunnel|ip_gre|gre|ip_tunnel|ip6_gre|ip6_tunnel|tunnel6|vrf'

nic_lab_build() {
  [ "$(cat "$NIC_LAB/new/modules" 2>/dev/null)" != "$NIC_MODULES" ] || [ ! -x "$NIC_LAB/qemu/run" ] || return 0
  echo "interop: building the virtual machine with NICs in $NIC_LAB (once)"
  local new=$NIC_LAB.$$ code uri s opts
  rm -rf "$new"; mkdir -p "$new"/{apt/lists/partial,apt/cache/archives/partial,deb,new,qemu,kernel}
  apt update || true
  apt_install qemu-system-x86 seabios busybox-static kmod cpio xz-utils iproute2 ethtool tcpdump || return 1
  # Newer suites than the machine's, in an index of their own.
  code=$(. /etc/os-release; echo "$VERSION_CODENAME")
  uri=$(apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI)' | sed -n "s/^Debian $code //p" | head -1)
  [ -n "$uri" ] || { echo "interop: no Debian $code in this machine's apt" >&2; return 1; }
  for s in ${NIC_LAB_SUITES:-bookworm-backports trixie trixie-backports}; do
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri $s main"
  done >"$new/apt/sources.list"
  opts=(-qq -o Acquire::Retries=5 -o "Dir::Etc::sourcelist=$new/apt/sources.list" -o Dir::Etc::sourceparts=-
    -o "Dir::State::lists=$new/apt/lists" -o "Dir::Cache=$new/apt/cache" -o APT::Sandbox::User=root)
  apt-get "${opts[@]}" update
  nic_lab_qemu "$new" "$code" "${opts[@]}" && nic_lab_kernel "$new" "${opts[@]}" || return 1
  rm -rf "$new/deb" "$new/apt" "$new/kernel" "$new/root" "$NIC_LAB"
  mv "$new" "$NIC_LAB"
}

# newest PACKAGE SUITE OPTIONS...: its newest version whose line of apt-cache madison has SUITE in it.
newest() { apt-cache "${@:3}" madison "$1" | grep "$2" | awk -F'|' '{ gsub(/ /, "", $2); print $2 }' | sort -rV | head -1; }

# nic_lab_qemu DIR CODENAME OPTIONS...: the machine's QEMU if it has igb (8.0), else that of the backports.
nic_lab_qemu() {
  local dir=$1 ver deb
  if qemu-system-x86_64 -device help 2>/dev/null | grep -q '"igb"'; then
    ln -s "$(command -v qemu-system-x86_64)" "$dir/qemu/run"
    return
  fi
  ver=$(newest qemu-system-x86 "$2-backports" "${@:3}")
  [ -n "$ver" ] || { echo "interop: no QEMU with igb in $2-backports" >&2; return 1; }
  (cd "$dir/deb" && apt-get "${@:3}" download "qemu-system-x86=$ver" "qemu-system-common=$ver" "qemu-system-data=$ver" &&
    for deb in *.deb; do dpkg -x "$deb" ../qemu && rm "$deb"; done) || return 1
  ln -s usr/bin/qemu-system-x86_64 "$dir/qemu/run"
}

# nic_lab_kernel DIR OPTIONS...: the newest kernel of all suites, and its initramfs.
nic_lab_kernel() {
  local dir=$1 pkg rel deb from
  shift
  pkg=$(apt-cache "$@" show "linux-image-amd64=$(newest linux-image-amd64 . "$@")" | sed -n 's/^Depends: .*\(linux-image-[0-9][^ ,]*\).*/\1/p' | head -1)
  rel=${pkg#linux-image-}
  (cd "$dir/deb" && for deb in image base binary modules; do # newer kernels are in several packages
    apt-get "$@" download "linux-$deb-$rel" >/dev/null 2>&1 || true
  done; for deb in *.deb; do dpkg -x "$deb" ../kernel; done)
  from=$(find "$dir/kernel" -type d -path "*/modules/$rel" | head -1)
  [ -n "$from" ] || { echo "interop: no modules of Linux $rel" >&2; return 1; }
  cp "$(find "$dir/kernel" -name vmlinuz -o -name "vmlinuz-$rel" | head -1)" "$dir/new/vmlinuz"
  echo "$rel" >"$dir/new/release"
  nic_lab_initrd "$dir/root" "$from" "$rel" "$dir/new/initrd.gz" && echo "$NIC_MODULES" >"$dir/new/modules"
}

# nic_lab_initrd R FROM RELEASE FILE: FROM is the folder of the kernel's modules.
nic_lab_initrd() {
  local R=$1 m to
  initrd_begin "$R" tcpdump
  find "$2/kernel" -regextype posix-extended -regex ".*/($NIC_MODULES)\.ko(\.xz)?" | while read -r m; do
    to=$R/lib/modules/$3/${m#"$2"/}
    mkdir -p "${to%/*}" && cp "$m" "$to"
  done
  find "$R/lib/modules" -name '*.xz' -exec xz -d {} +
  cat >"$R/init" <<'I'
#!/bin/sh
export PATH=/usr/sbin:/sbin:/usr/bin:/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp; mount -t tmpfs run /run
mkdir -p /sys/fs/bpf; mount -t bpf bpf /sys/fs/bpf
ulimit -l unlimited
for turn in 1 2 3; do for f in $(find /sys/devices -name modalias); do modprobe -q "$(cat $f)"; done; [ -e /sys/class/net/eth0 ] && break; sleep 1; done
ip link set lo up
for a in $(cat /proc/cmdline); do case $a in ipaddr=*) IP=${a#ipaddr=};; run=*) RUN=${a#run=};; esac; done
ip link set eth0 up; ip addr add $IP dev eth0
for i in $(seq 100); do [ "$(cat /sys/class/net/eth0/carrier 2>/dev/null)" = 1 ] && break; sleep 0.1; done
echo "nic-lab: guest ready: Linux $(uname -r), $(ethtool -i eth0 | sed -n 's/driver: //p'), $(ls -d /sys/class/net/eth0/queues/rx-* | wc -l) rx queues"
sh -c "$(echo $RUN | base64 -d)"; echo "nic-lab: exit $?"
poweroff -f
I
  initrd_end "$R" "$2" "$3" "$4"
}

nic_lab_use() {
  local mods=$NIC_LAB/qemu/usr/lib/x86_64-linux-gnu/qemu machine=q35,kernel-irqchip=off
  # A QEMU of its own must not load the modules of the machine's: ip netns exec gives a mount namespace to hide those in.
  VM_QEMU=(sh -c '[ ! -d "$0" ] || mount --bind "$0" /usr/lib/x86_64-linux-gnu/qemu; exec "$@"' "$mods"
    "$NIC_LAB/qemu/run" -L "$NIC_LAB/qemu/usr/share/qemu" -L /usr/share/seabios -L /usr/share/qemu -M "$machine")
  VM_KERNEL=$NIC_LAB/new/vmlinuz VM_MEM=1536 VM_SMP=2,maxcpus=3 VM_TAP=vnet_hdr=on
  case $1 in
    virtio*) VM_DEVICE=virtio-net-pci,mq=on,vectors=6 VM_TAP+=,queues=2 ;;
    *) VM_DEVICE=$1 ;;
  esac
  case $1 in
    virtio-zc)
      VM_QEMU+=(-device intel-iommu,intremap=on,device-iotlb=on)
      VM_DEVICE+=,iommu_platform=on,ats=on,disable-legacy=on ;;
    virtio-old) VM_DEVICE+=,mrg_rxbuf=off ;;
  esac
}
