/* A library that answers as libnvidia-ml does, for machines that have none. The real pynvml loads it in a process of its own.
 *
 * FAKE_NVML names the machine: a100, h100-mig, two, missing-driver, mismatch, denied, old, hangs.
 * Figures are those of the makers' data sheets; UUIDs are invented.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int uint;
typedef unsigned long long ull;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, MISMATCH = 18 };

struct device {
    const char *name, *uuid, *vbios;
    int major, minor, mig, links;
    uint cores;
    ull memory;
};
static struct device A100 = {"NVIDIA A100-SXM4-80GB", "GPU-aaaaaaaa-0000-4000-8000-000000000001", "92.00.45.00.03", 8, 0, 0, 12, 6912, 85899345920ULL};
static struct device H100 = {"NVIDIA H100 80GB HBM3", "GPU-bbbbbbbb-0000-4000-8000-000000000002", "96.00.89.00.01", 9, 0, 1, 18, 16896, 85520809984ULL};
static struct device L4 = {"NVIDIA L4", "GPU-cccccccc-0000-4000-8000-000000000003", "95.04.29.00.06", 8, 9, 0, 0, 7424, 24152899584ULL};
static struct device MIG[2] = {
    {"NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG-dddddddd-0000-4000-8000-000000000004", "", 9, 0, 0, 0, 0, 42949672960ULL},
    {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-eeeeeeee-0000-4000-8000-000000000005", "", 9, 0, 0, 0, 0, 10737418240ULL},
};

static const char *machine(void) { const char *name = getenv("FAKE_NVML"); return name ? name : "a100"; }
static int is(const char *name) { return strcmp(machine(), name) == 0; }
static int supported(struct device *d) { return d != &L4 && !is("old"); }

static int copy(char *to, uint size, const char *from) { snprintf(to, size, "%s", from); return OK; }

int nvmlInitWithFlags(uint flags) {
    (void)flags;
    if (is("missing-driver")) return DRIVER_NOT_LOADED;
    if (is("mismatch")) return MISMATCH;
    if (is("denied")) return NO_PERMISSION;
    if (is("hangs")) sleep(600);
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) {
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}
int nvmlSystemGetDriverVersion(char *to, uint size) { return copy(to, size, "580.65.06"); }
int nvmlSystemGetNVMLVersion(char *to, uint size) { return copy(to, size, "13.580.65.06"); }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { *to = 13000; return OK; }
int nvmlDeviceGetCount_v2(uint *to) { *to = is("two") ? 2 : 1; return OK; }
int nvmlDeviceGetHandleByIndex_v2(uint index, struct device **to) {
    if (index >= (is("two") ? 2u : 1u)) return INVALID;
    *to = is("h100-mig") ? &H100 : is("two") && index == 1 ? &L4 : &A100;
    return OK;
}
int nvmlDeviceGetName(struct device *d, char *to, uint size) { return copy(to, size, d->name); }
int nvmlDeviceGetUUID(struct device *d, char *to, uint size) { return copy(to, size, d->uuid); }
int nvmlDeviceGetVbiosVersion(struct device *d, char *to, uint size) { return copy(to, size, d->vbios); }
int nvmlDeviceGetCudaComputeCapability(struct device *d, int *major, int *minor) { *major = d->major; *minor = d->minor; return OK; }
int nvmlDeviceGetMemoryInfo(struct device *d, ull *to) { to[0] = d->memory; to[1] = d->memory / 2; to[2] = d->memory / 2; return OK; }
int nvmlDeviceGetMigMode(struct device *d, uint *now, uint *next) {
    if (!supported(d)) return NOT_SUPPORTED;
    *now = *next = (uint)d->mig;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(struct device *d, uint *to) { *to = d->mig ? 7 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(struct device *d, uint index, struct device **to) {
    if (!d->mig || (index != 0 && index != 2)) return NOT_FOUND; /* slices leave holes */
    *to = &MIG[index / 2];
    return OK;
}
struct attributes { uint sm, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices; ull memory_mb; };
int nvmlDeviceGetAttributes_v2(struct device *d, struct attributes *to) {
    memset(to, 0, sizeof *to);
    to->sm = d == &MIG[0] ? 60 : 16;
    to->gpu_slices = d == &MIG[0] ? 3 : 1;
    to->memory_mb = d->memory >> 20;
    return OK;
}
int nvmlDeviceGetEccMode(struct device *d, uint *now, uint *next) { if (!supported(d)) return NOT_SUPPORTED; *now = *next = 1; return OK; }
int nvmlDeviceGetTotalEccErrors(struct device *d, int kind, int counter, ull *to) {
    (void)kind; (void)counter;
    if (!supported(d)) return NO_PERMISSION;
    *to = 0;
    return OK;
}
int nvmlDeviceGetRemappedRows(struct device *d, uint *a, uint *b, uint *c, uint *e) { if (!supported(d)) return NOT_SUPPORTED; *a = 1; *b = *c = *e = 0; return OK; }
int nvmlDeviceGetGspFirmwareVersion(struct device *d, char *to) { (void)d; return copy(to, 16, "580.65.06"); }
int nvmlDeviceGetPersistenceMode(struct device *d, int *to) { (void)d; *to = 1; return OK; }
int nvmlDeviceGetComputeMode(struct device *d, int *to) { (void)d; *to = 0; return OK; }
int nvmlDeviceGetNumGpuCores(struct device *d, uint *to) { *to = d->cores; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(struct device *d, uint *to) { (void)d; *to = 400000; return OK; }
int nvmlDeviceGetNvLinkState(struct device *d, uint link, int *to) {
    if (!d->links) return NOT_SUPPORTED;
    if (link >= (uint)d->links) return INVALID;
    *to = 1;
    return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(struct device *a, struct device *b, int *to) { (void)a; (void)b; *to = 50; return OK; }
int nvmlSystemGetConfComputeState(uint *to) { to[0] = to[1] = to[2] = 0; return OK; }
