// Package helm holds no code: its test renders the chart in iwarpd/ and checks
// what it yields against the types of the Kubernetes API.
package helm

import (
	"bytes"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	kyaml "sigs.k8s.io/yaml"
)

// notes is the file of the chart that helm install prints.
const notes = "iwarpd/templates/NOTES.txt"

// files returns the rendered templates of the chart with the given values, by name.
func files(values map[string]any) (map[string]string, error) {
	chart, err := loader.Load("iwarpd")
	if err != nil {
		return nil, err
	}
	release := chartutil.ReleaseOptions{Name: "rdma", Namespace: "kube-system", IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, values, release, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	return engine.Render(chart, all)
}

// render returns the objects of the chart with the given values, as YAML.
func render(values map[string]any) ([]string, error) {
	all, err := files(values)
	if err != nil {
		return nil, err
	}
	return split(all), nil
}

func rendered(t *testing.T, values map[string]any) []string {
	t.Helper()
	docs, err := render(values)
	if err != nil {
		t.Fatal(err)
	}
	return docs
}

// split returns the objects of rendered templates.
func split(files map[string]string) (docs []string) {
	delete(files, notes)
	for _, text := range files {
		for doc := range strings.SplitSeq(text, "\n---\n") {
			if strings.TrimSpace(doc) != "" {
				docs = append(docs, doc)
			}
		}
	}
	return docs
}

// TestVersion checks that the chart has the version that the programs print, and names
// their image.
func TestVersion(t *testing.T) {
	chart, err := loader.Load("iwarpd")
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("../version").Output()
	if err != nil {
		t.Fatal(err)
	}
	version, _, _ := strings.Cut(strings.TrimSpace(string(out)), "+")
	version, _, _ = strings.Cut(version, "~")
	if m := chart.Metadata; version == "" || m.Version != version || m.AppVersion != version {
		t.Errorf("the chart has version %s for %s; deploy/version prints %s", m.Version, m.AppVersion, out)
	}
}

// TestKubernetes checks that the chart refuses a Kubernetes whose kubelet starts pods without the CDI devices that the
// plugin allocates: it was an alpha feature in 1.28, which is off by default.
func TestKubernetes(t *testing.T) {
	chart, err := loader.Load("iwarpd")
	if err != nil {
		t.Fatal(err)
	}
	for version, want := range map[string]bool{"v1.28.15": false, "v1.29.0": true, "v1.29.4-gke.1": true} {
		if chartutil.IsCompatibleRange(chart.Metadata.KubeVersion, version) != want {
			t.Errorf("Kubernetes %s: the chart wants %s", version, chart.Metadata.KubeVersion)
		}
	}
}

// decode reads the objects strictly: an unknown or a double field is an error.
func decode(t *testing.T, docs []string) (sets []apps.DaemonSet, maps []core.ConfigMap) {
	t.Helper()
	for _, doc := range docs {
		var kind struct{ Kind string }
		if err := kyaml.Unmarshal([]byte(doc), &kind); err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		var err error
		switch kind.Kind {
		case "DaemonSet":
			sets = append(sets, apps.DaemonSet{})
			err = kyaml.UnmarshalStrict([]byte(doc), &sets[len(sets)-1])
		case "ConfigMap":
			maps = append(maps, core.ConfigMap{})
			err = kyaml.UnmarshalStrict([]byte(doc), &maps[len(maps)-1])
		default:
			t.Fatalf("a %q in\n%s", kind.Kind, doc)
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
	}
	return sets, maps
}

func TestChart(t *testing.T) {
	docs := rendered(t, map[string]any{"interface": "ens1"})
	sets, maps := decode(t, docs)
	if len(sets) != 1 || len(maps) != 1 {
		t.Fatalf("%d DaemonSets, %d ConfigMaps; want one of each", len(sets), len(maps))
	}
	pod := sets[0].Spec.Template.Spec
	if sets[0].Name != "rdma" || !pod.HostNetwork || len(pod.Containers) != 2 || len(pod.InitContainers) != 1 {
		t.Errorf("%s: host network %v, %d containers", sets[0].Name, pod.HostNetwork, len(pod.Containers))
	}
	if links := pod.EnableServiceLinks; links == nil || *links {
		t.Error("the variables of Services are set, among them IWARPD_PORT of one named iwarpd, with which the daemon does not start")
	}
	for k, v := range sets[0].Spec.Selector.MatchLabels {
		if sets[0].Spec.Template.Labels[k] != v {
			t.Errorf("the selector's %s=%s is no label of the pods", k, v)
		}
	}
	volumes := make(map[string]bool)
	for _, v := range pod.Volumes {
		volumes[v.Name] = true
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		if s := c.SecurityContext; *s.AllowPrivilegeEscalation || s.Privileged != nil && *s.Privileged || !slices.Equal(s.Capabilities.Drop, []core.Capability{"ALL"}) {
			t.Errorf("%s: security context %+v", c.Name, s)
		}
		if want := "registry.example.org/iwarpd:0.2.0"; c.Image != want {
			t.Errorf("%s: image %s; want %s", c.Name, c.Image, want)
		}
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				t.Errorf("%s mounts %s, which is no volume", c.Name, m.Name)
			}
		}
	}
	for _, want := range []string{"interfaces:\n- ens1\n", "socket: /run/iwarpd/iwarpd.sock\n", "folder: /run/iwarpd/slots\n", "count: 64\n"} {
		if !strings.Contains(maps[0].Data["iwarpd.yaml"]+"\n", want) {
			t.Errorf("iwarpd.yaml lacks %q:\n%s", want, maps[0].Data["iwarpd.yaml"])
		}
	}
}

// TestSeccomp checks that the daemon and doctor may call bpf and userfaultfd, whatever profile the node has by default,
// and that the device plugin, which needs neither, has the runtime's profile.
func TestSeccomp(t *testing.T) {
	docs := rendered(t, map[string]any{"interface": "eth0"})
	sets, _ := decode(t, docs)
	pod := sets[0].Spec.Template.Spec
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		want := core.SeccompProfileTypeUnconfined
		if c.Name == "device-plugin" {
			want = core.SeccompProfileTypeRuntimeDefault
		}
		if p := c.SecurityContext.SeccompProfile; p == nil || p.Type != want {
			t.Errorf("%s: seccomp profile %v; want %s", c.Name, p, want)
		}
	}
}

// TestNoLibraries checks that nodes need no folder of libraries: some cannot make it, since their /usr is read-only.
func TestNoLibraries(t *testing.T) {
	docs := rendered(t, map[string]any{"interface": "eth0", "libraries": ""})
	sets, _ := decode(t, docs)
	pod := sets[0].Spec.Template.Spec
	for _, v := range pod.Volumes {
		if v.Name == "libraries" {
			t.Errorf("volume %+v", v.HostPath)
		}
	}
	for _, c := range pod.Containers {
		for _, m := range c.VolumeMounts {
			if m.Name == "libraries" {
				t.Errorf("%s: mount at %q", c.Name, m.MountPath)
			}
		}
	}
}

// TestGroups checks that each group of nodes has its own DaemonSet and configuration.
func TestGroups(t *testing.T) {
	docs := rendered(t, map[string]any{"interface": "eth0", "groups": map[string]any{
		"storage": map[string]any{"interfaces": []any{"ens2f0", "ens2f1"}},
		"default": nil,
		"compute": map[string]any{"interface": "eth1", "config": map[string]any{"xdp-mode": "native"}},
	}})
	sets, maps := decode(t, docs)
	got := make(map[string]string)
	for _, s := range sets {
		group := s.Spec.Template.Spec.NodeSelector["iwarpd.io/group"]
		for _, m := range maps {
			if m.Name == s.Name {
				got[group] = m.Data["iwarpd.yaml"]
			}
		}
	}
	for group, want := range map[string][]string{
		"storage": {"interfaces:\n- ens2f0\n- ens2f1\n"}, "compute": {"interfaces:\n- eth1\n", "xdp-mode: native"}, "default": {"interfaces:\n- eth0\n"},
	} {
		for _, w := range want {
			if !strings.Contains(got[group]+"\n", w) {
				t.Errorf("group %s lacks %q:\n%s", group, w, got[group])
			}
		}
	}
	if strings.Contains(got["storage"], "xdp-mode") {
		t.Error("storage has the setting of compute")
	}
}

// TestNumericNames checks that names that look like other things than text are text in the objects.
func TestNumericNames(t *testing.T) {
	for _, name := range []string{"1", "1e3", "on", "null"} {
		chart, err := loader.Load("iwarpd")
		if err != nil {
			t.Fatal(err)
		}
		values := map[string]any{"interface": "eth0", "groups": map[string]any{name: nil}}
		for _, values := range []map[string]any{values, {"interface": "eth0"}} {
			all, err := chartutil.ToRenderValues(chart, values, chartutil.ReleaseOptions{Name: name}, chartutil.DefaultCapabilities)
			if err != nil {
				t.Fatal(err)
			}
			text, err := engine.Render(chart, all)
			if err != nil {
				t.Fatal(err)
			}
			sets, maps := decode(t, split(text))
			if len(sets) != 1 || len(maps) != 1 || sets[0].Labels["app.kubernetes.io/instance"] != name {
				t.Errorf("%d DaemonSets, %d ConfigMaps, labels %v", len(sets), len(maps), sets[0].Labels)
			}
			if g := sets[0].Spec.Template.Spec.NodeSelector["iwarpd.io/group"]; values["groups"] != nil && g != name {
				t.Errorf("group %q; want %q", g, name)
			}
		}
	}
}

// TestNotes checks that helm install prints how to label nodes, and how to check the pods.
func TestNotes(t *testing.T) {
	all, err := files(map[string]any{"interface": "eth0", "resource": "example.org/rdma", "groups": map[string]any{"storage": nil}})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"kubectl label node NODE iwarpd.io/group=storage\n", "kubectl -n kube-system get pods -o wide -l app.kubernetes.io/instance=rdma\n",
		"offers 64 of example.org/rdma:", "resources.limits: example.org/rdma: 1",
	} {
		if !strings.Contains(all[notes], want) {
			t.Errorf("the notes lack %q:\n%s", want, all[notes])
		}
	}
}

// TestWrongValues checks that the chart refuses values that the daemon would refuse, and says
// why.
func TestWrongValues(t *testing.T) {
	for _, tt := range []struct {
		values map[string]any
		want   string
	}{
		{nil, "name the interface to serve"},
		{map[string]any{"groups": map[string]any{"a": map[string]any{}}}, "groups.a.interface"},
		{map[string]any{"interface": "eth0", "interfaces": []any{"eth1"}}, "are both set"},
		{map[string]any{"interface": "eth0", "groups": map[string]any{"a": map[string]any{"interface": "eth1", "interfaces": []any{"eth2"}}}}, "are both set"},
		{map[string]any{"interface": "eth0", "groups": map[string]any{"Rack_1": nil}}, "Rack_1"},
		{map[string]any{"interfaces": "eth0,eth1"}, "interfaces"},
		{map[string]any{"interfaces": []any{"eth0", "eth0"}}, "interfaces"},
		{map[string]any{"interfaces": []any{"eth0"}, "groups": map[string]any{"a": map[string]any{"nic": "eth1"}}}, "nic"},
		{map[string]any{"interface": "eth0", "slots": map[string]any{"count": "many"}}, "count"},
		{map[string]any{"interface": 5}, "interface"},
		{map[string]any{"interface": "eth0", "slots": 16}, "slots"},
		{map[string]any{"interface": "eth0", "config": "log-level: debug"}, "config"},
		{map[string]any{"interface": "eth0", "image": "iwarpd:0.2.0"}, "image"},
		{map[string]any{"interface": "eth0", "image": map[string]any{"pullPolicy": "Sometimes"}}, "pullPolicy"},
		{map[string]any{"interface": "eth0", "nodeSelector": []any{"a"}}, "nodeSelector"},
		{map[string]any{"interface": "eth0", "tolerations": map[string]any{}}, "tolerations"},
		{map[string]any{"interface": "eth0", "terminationGracePeriodSeconds": "5s"}, "terminationGracePeriodSeconds"},
		{map[string]any{"interface": "eth0", "resources": map[string]any{"daemon": map[string]any{}}}, "daemon"},
		{map[string]any{"interface": "eth0", "nic": "eth1"}, "nic"},
	} {
		if docs, err := render(tt.values); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v: error %v, %d objects; want an error about %q", tt.values, err, len(docs), tt.want)
		}
	}
}

// TestNumbers checks that numbers, which Helm reads as floating point, reach the daemon as it takes them.
func TestNumbers(t *testing.T) {
	docs := rendered(t, map[string]any{"interface": "eth0", "config": map[string]any{"receive-window": 8388608.0, "max-registered": 1099511627776.0, "max-qps": 17.0}})
	_, maps := decode(t, docs)
	for _, want := range []string{"\nreceive-window: 8388608\n", "\nmax-registered: 1099511627776\n", "\nmax-qps: 17\n"} {
		if !strings.Contains("\n"+maps[0].Data["iwarpd.yaml"], want) {
			t.Errorf("iwarpd.yaml lacks %q:\n%s", want, maps[0].Data["iwarpd.yaml"])
		}
	}
}

// TestSlotsFolder checks that the daemon makes its slots where the device plugin looks for them, whatever the values
// say: the pod has no other folder of the node that both see.
func TestSlotsFolder(t *testing.T) {
	slots := map[string]any{"folder": "/srv/slots"}
	docs := rendered(t, map[string]any{"interface": "eth0", "runDir": "/run/rdma", "slots": slots})
	sets, maps := decode(t, docs)
	text := maps[0].Data["iwarpd.yaml"]
	if !strings.Contains(text, "folder: /run/rdma/slots\n") || !strings.Contains(text, "count: 64\n") {
		t.Errorf("iwarpd.yaml is\n%s", text)
	}
	if plugin := sets[0].Spec.Template.Spec.Containers[1].Command; !slices.Contains(plugin, "-slots=/run/rdma/slots") {
		t.Errorf("the plugin is %q", plugin)
	}
}

// TestSocketTransport checks that the chart needs no interface when the transport is kernel
// sockets.
func TestSocketTransport(t *testing.T) {
	docs := rendered(t, map[string]any{"config": map[string]any{"transport": "socket"}})
	if _, maps := decode(t, docs); strings.Contains(maps[0].Data["iwarpd.yaml"], "interface") || !strings.Contains(maps[0].Data["iwarpd.yaml"], "transport: socket") {
		t.Errorf("iwarpd.yaml is\n%s", maps[0].Data["iwarpd.yaml"])
	}
}

// TestLint checks that helm lint reports nothing.
func TestLint(t *testing.T) {
	for _, m := range lint.All("iwarpd", map[string]any{"interface": "eth0"}, "kube-system", true).Messages {
		if m.Severity >= support.WarningSev {
			t.Error(m)
		}
	}
}

// TestConfigKeys checks that the daemon knows every key that the chart writes.
func TestConfigKeys(t *testing.T) {
	docs := rendered(t, map[string]any{"interface": "ens1"})
	_, maps := decode(t, docs)
	known := packaged(t)
	var conf map[string]any
	if err := yaml.NewDecoder(bytes.NewReader([]byte(maps[0].Data["iwarpd.yaml"]))).Decode(&conf); err != nil {
		t.Fatal(err)
	}
	for key := range conf {
		if _, ok := known[key]; !ok {
			t.Errorf("the daemon has no key %q", key)
		}
	}
}

// packaged returns the keys of deploy/iwarpd.yaml.
func packaged(t *testing.T) map[string]any {
	t.Helper()
	text, err := os.ReadFile("../iwarpd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var keys map[string]any
	if err := yaml.Unmarshal(text, &keys); err != nil {
		t.Fatal(err)
	}
	return keys
}
