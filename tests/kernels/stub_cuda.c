/* A libcuda.so.1 without a GPU: it loads nothing, launches nothing, and keeps what a launch got.

   Every function has the driver's name and arguments; any call succeeds. Triton's own launcher is
   compiled against this, so what arrives here is what a GPU would have been given. */

#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_PARAMETERS 128

/* CUlaunchConfig up to the stream: grid, block, shared bytes. */
struct config {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
};

struct launch {
    unsigned grid[3], block[3];
    uint64_t stream, function;
    uint64_t parameters[MOST_PARAMETERS];
};

static struct launch last;
static int launches, unloads, parameters;
static uint64_t handles = 0x1000;

/* How many parameters the next launches have; the driver reads that from the kernel. */
EXPORT void stub_expect(int count) { parameters = count; }
EXPORT int stub_launches(void) { return launches; }
EXPORT int stub_unloads(void) { return unloads; }
EXPORT const struct launch *stub_last(void) { return &last; }

EXPORT int cuLaunchKernelEx(const struct config *config, void *function, void **given,
                            void **extra) {
    (void)extra;
    memcpy(last.grid, config->grid, sizeof last.grid);
    memcpy(last.block, config->block, sizeof last.block);
    last.stream = (uint64_t)config->stream;
    last.function = (uint64_t)function;
    for (int i = 0; i < parameters; i++)
        memcpy(&last.parameters[i], given[i], sizeof(uint64_t));
    launches++;
    return 0;
}

EXPORT int cuInit(unsigned flags) { (void)flags; return 0; }
EXPORT int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
EXPORT int cuDeviceGetCount(int *count) { *count = 1; return 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    *context = &last;
    return 0;
}
EXPORT int cuCtxGetCurrent(void **context) { *context = &last; return 0; }
EXPORT int cuCtxSetCurrent(void *context) { (void)context; return 0; }
EXPORT int cuCtxGetDevice(int *device) { *device = 0; return 0; }
EXPORT int cuCtxGetLimit(size_t *value, int limit) { (void)limit; *value = 0; return 0; }
EXPORT int cuCtxSetLimit(int limit, size_t value) { (void)limit; (void)value; return 0; }

/* Shared memory and the like of an sm_90; its compute capability is attributes 75 and 76. */
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 227 * 1024;
    return 0;
}

EXPORT int cuModuleLoadData(void **module, const void *image) {
    (void)image;
    *module = (void *)(handles += 16);
    return 0;
}
EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)name;
    *function = (char *)module + 1;
    return 0;
}
EXPORT int cuModuleUnload(void *module) { (void)module; unloads++; return 0; }

/* Attribute 0 is the most threads of a block. */
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    *value = attribute == 0 ? 1024 : 0;
    return 0;
}
EXPORT int cuFuncSetAttribute(void *function, int attribute, int value) {
    (void)function; (void)attribute; (void)value;
    return 0;
}
EXPORT int cuFuncSetCacheConfig(void *function, int config) {
    (void)function; (void)config;
    return 0;
}

EXPORT int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "the stub was asked for what it does not have";
    return 0;
}

/* Linked or looked up, never called. */
#define UNUSED(name) EXPORT int name(void) { return 1; }
UNUSED(cuOccupancyMaxActiveClusters)
UNUSED(cuPointerGetAttribute)
UNUSED(cuPointerGetAttributes)
UNUSED(cuStreamIsCapturing)
UNUSED(cuTensorMapEncodeIm2col)
UNUSED(cuTensorMapEncodeTiled)
