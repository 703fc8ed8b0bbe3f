/* A library that answers as libnvidia-ml does, for machines that have none. The real pynvml loads it in a process of its own.
 *
 * FAKE_NVML names a scenario file, read at each nvmlInit. Its lines:
 *     device MODEL [UUID]        a100, h100, l4: one more device, in the order of the bus
 *     slice PARENT NUMBER GPU_SLICES COMPUTE_SLICES SM MEMORY_MB UUID    divides a device; numbers may leave holes
 *     unnamed                    slices do not tell their profile by name, as with older drivers
 *     fail FUNCTION CODE [INDEX] this function answers with an error (of this device alone)
 *     hang FUNCTION              this function does not return
 * Figures are those of the makers' data sheets; UUIDs are invented.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int uint;
typedef unsigned long long ull;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
enum { MOST = 8 };

struct kind { const char *key, *name, *vbios, *uuid; int major, minor, links, old; uint cores; ull memory; };
static const struct kind KINDS[] = {
    {"a100", "NVIDIA A100-SXM4-80GB", "92.00.45.00.03", "GPU-aaaaaaaa-0000-4000-8000-000000000001", 8, 0, 12, 0, 6912, 85899345920ULL},
    {"h100", "NVIDIA H100 80GB HBM3", "96.00.89.00.01", "GPU-bbbbbbbb-0000-4000-8000-000000000002", 9, 0, 18, 0, 16896, 85520809984ULL},
    {"l4", "NVIDIA L4", "95.04.29.00.06", "GPU-cccccccc-0000-4000-8000-000000000003", 8, 9, 0, 1, 7424, 24152899584ULL},
};
struct device { const struct kind *kind; int index, divided; char uuid[80]; uint number, gpu_slices, compute_slices, sm; ull memory_mb; };
static struct device devices[MOST], slices[MOST];
static struct fault { char function[64]; int code, index; } faults[16];
static uint n_devices, n_slices, n_faults;
static int unnamed;

static void scenario(void) {
    char line[256];
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "", "r");
    n_devices = n_slices = n_faults = 0;
    unnamed = 0;
    while (file && fgets(line, sizeof line, file)) {
        char word[64] = "", uuid[80] = "";
        struct device *slice = &slices[n_slices];
        struct fault *fault = &faults[n_faults];
        uint parent;
        if (sscanf(line, "device %63s %79s", word, uuid) >= 1) {
            struct device *device = &devices[n_devices];
            memset(device, 0, sizeof *device);
            for (uint at = 0; at < sizeof KINDS / sizeof *KINDS; at++) if (!strcmp(word, KINDS[at].key)) device->kind = &KINDS[at];
            device->index = (int)n_devices++;
            strcpy(device->uuid, *uuid ? uuid : device->kind->uuid);
        } else if (sscanf(line, "slice %u %u %u %u %u %llu %79s", &parent, &slice->number, &slice->gpu_slices, &slice->compute_slices, &slice->sm, &slice->memory_mb, slice->uuid) == 7) {
            slice->kind = devices[parent].kind;
            slice->index = (int)parent;
            devices[parent].divided = 1;
            n_slices++;
        } else if (!strncmp(line, "unnamed", 7)) {
            unnamed = 1;
        } else if (sscanf(line, "hang %63s", fault->function) == 1) {
            fault->code = -1;
            fault->index = -1;
            n_faults++;
        } else {
            fault->index = -1;
            if (sscanf(line, "fail %63s %d %d", fault->function, &fault->code, &fault->index) >= 2) n_faults++;
        }
    }
    if (file) fclose(file);
}

static int fault(const char *function, int index) {
    for (uint at = 0; at < n_faults; at++)
        if (!strcmp(faults[at].function, function) && (faults[at].index < 0 || faults[at].index == index)) {
            if (faults[at].code < 0) for (;;) sleep(600);
            return faults[at].code;
        }
    return OK;
}
#define ANSWER(index) do { int code = fault(__func__, index); if (code) return code; } while (0)
#define SUPPORTED(device) do { if ((device)->kind->old) return NOT_SUPPORTED; } while (0)

static int copy(char *to, uint size, const char *from) { snprintf(to, size, "%s", from); return OK; }

int nvmlInitWithFlags(uint flags) { (void)flags; scenario(); ANSWER(-1); return OK; }
int nvmlShutdown(void) { ANSWER(-1); return OK; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *to, uint size) { ANSWER(-1); return copy(to, size, "580.65.06"); }
int nvmlSystemGetNVMLVersion(char *to, uint size) { ANSWER(-1); return copy(to, size, "13.580.65.06"); }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { ANSWER(-1); *to = 13000; return OK; }
int nvmlSystemGetConfComputeState(uint *to) { ANSWER(-1); to[0] = to[1] = to[2] = 0; return OK; }
int nvmlDeviceGetCount_v2(uint *to) { ANSWER(-1); *to = n_devices; return OK; }
int nvmlDeviceGetHandleByIndex_v2(uint index, struct device **to) {
    ANSWER((int)index);
    if (index >= n_devices) return INVALID;
    *to = &devices[index];
    return OK;
}
static int is_slice(struct device *d) { return d >= slices && d < slices + MOST; }
int nvmlDeviceGetName(struct device *d, char *to, uint size) {
    char name[96];
    ANSWER(d->index);
    if (!is_slice(d) || unnamed) return copy(to, size, d->kind->name);
    snprintf(name, sizeof name, "%s MIG %ug.%llugb", d->kind->name, d->gpu_slices, (d->memory_mb + 512) / 1024);
    return copy(to, size, name);
}
int nvmlDeviceGetUUID(struct device *d, char *to, uint size) { ANSWER(d->index); return copy(to, size, d->uuid); }
int nvmlDeviceGetVbiosVersion(struct device *d, char *to, uint size) { ANSWER(d->index); return copy(to, size, d->kind->vbios); }
int nvmlDeviceGetCudaComputeCapability(struct device *d, int *major, int *minor) { ANSWER(d->index); *major = d->kind->major; *minor = d->kind->minor; return OK; }
int nvmlDeviceGetMemoryInfo(struct device *d, ull *to) { ANSWER(d->index); to[0] = d->kind->memory; to[1] = to[2] = to[0] / 2; return OK; }
int nvmlDeviceGetMigMode(struct device *d, uint *now, uint *next) { ANSWER(d->index); SUPPORTED(d); *now = *next = (uint)d->divided; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(struct device *d, uint *to) { ANSWER(d->index); *to = d->divided ? 7 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(struct device *d, uint index, struct device **to) {
    ANSWER(d->index);
    for (uint at = 0; at < n_slices; at++) if (slices[at].index == d->index && slices[at].number == index) { *to = &slices[at]; return OK; }
    return NOT_FOUND;
}
struct attributes { uint sm, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices; ull memory_mb; };
int nvmlDeviceGetAttributes_v2(struct device *d, struct attributes *to) {
    ANSWER(d->index);
    if (!is_slice(d)) return NOT_SUPPORTED;
    *to = (struct attributes){.sm = d->sm, .gpu_slices = d->gpu_slices, .compute_slices = d->compute_slices, .memory_mb = d->memory_mb};
    return OK;
}
int nvmlDeviceGetEccMode(struct device *d, uint *now, uint *next) { ANSWER(d->index); SUPPORTED(d); *now = *next = 1; return OK; }
int nvmlDeviceGetTotalEccErrors(struct device *d, int kind, int counter, ull *to) { (void)kind; (void)counter; ANSWER(d->index); SUPPORTED(d); *to = 0; return OK; }
int nvmlDeviceGetRemappedRows(struct device *d, uint *a, uint *b, uint *c, uint *e) { ANSWER(d->index); SUPPORTED(d); *a = 1; *b = *c = *e = 0; return OK; }
int nvmlDeviceGetGspFirmwareVersion(struct device *d, char *to) { ANSWER(d->index); return copy(to, 16, "580.65.06"); }
int nvmlDeviceGetPersistenceMode(struct device *d, int *to) { ANSWER(d->index); *to = 1; return OK; }
int nvmlDeviceGetComputeMode(struct device *d, int *to) { ANSWER(d->index); *to = 0; return OK; }
int nvmlDeviceGetNumGpuCores(struct device *d, uint *to) { ANSWER(d->index); *to = d->kind->cores; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(struct device *d, uint *to) { ANSWER(d->index); *to = 400000; return OK; }
int nvmlDeviceGetNvLinkState(struct device *d, uint link, int *to) {
    ANSWER(d->index);
    if (!d->kind->links) return NOT_SUPPORTED;
    if (link >= (uint)d->kind->links) return INVALID;
    *to = 1;
    return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(struct device *a, struct device *b, int *to) { (void)b; ANSWER(a->index); *to = 50; return OK; }
