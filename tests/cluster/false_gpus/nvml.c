// A driver's library without a driver: as many GPUs as FALSE_GPUS says, of which all reach each other over NVLink. It runs
// the CUDA that FALSE_CUDA names, such as 12080.
#include <stdlib.h>
#include <stdio.h>

typedef struct { unsigned long long total, free, used; } Memory;

static long number(const char *name, long otherwise) {
  const char *said = getenv(name);
  return said != NULL ? atol(said) : otherwise;
}

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "no such GPU"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)number("FALSE_GPUS", 0); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned size) { (void)device; snprintf(name, size, "NVIDIA H100 false"); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) { snprintf(uuid, size, "GPU-false-%ld", (long)device); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
  (void)device;
  memory->total = memory->free = 80ull << 30;
  memory->used = 0;
  return 0;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int what, int *status) { (void)one; (void)other; (void)what; *status = 0; return 0; }
int nvmlDeviceGetMaxClockInfo(void *device, int clock, unsigned *megahertz) { (void)device; (void)clock; *megahertz = 2619; return 0; }
int nvmlDeviceGetMemoryBusWidth(void *device, unsigned *bits) { (void)device; *bits = 5120; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, unsigned *use) { (void)device; use[0] = use[1] = 0; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, void *joules) { (void)device; (void)joules; return 3; }  // not told
int nvmlDeviceGetEnforcedPowerLimit(void *device, void *watts) { (void)device; (void)watts; return 3; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *infos) { (void)device; (void)infos; *count = 0; return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) {
  snprintf(version, size, number("FALSE_CUDA", 13000) < 13000 ? "570.124.06" : "580.65.06");
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = (int)number("FALSE_CUDA", 13000); return 0; }
