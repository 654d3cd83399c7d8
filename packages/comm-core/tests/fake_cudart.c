/* A CUDA runtime for tests on machines without a GPU: "device memory" is POSIX shared memory, so
 * that handles really work between processes. Built by the tests with gcc; never installed.
 *
 * It is strict where the real one is silent or undefined: a handle that lost a byte, an address
 * that is not the base of its allocation, a free while another process has the memory mapped, an
 * unmap of something not mapped, and a call on another device than the memory belongs to are errors
 * here. Any call can be made to fail (fake_fail), and what is alive can be counted
 * (fake_allocations, fake_imports, fake_violations). FAKE_CUDART_LOG names a file to which every
 * process appends its calls, in order.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  MEMORY_ALLOCATION = 2,
  INVALID_DEVICE = 101,
  DEVICE_UNINITIALIZED = 201, /* what CUDA answers to a process that opens its own handle */
  MAP_FAILED_CODE = 205,
  INVALID_HANDLE = 400,
  VIOLATION = 719, /* of a rule that the real runtime does not check */
};

#define HEADER                                                                      \
  4096 /* bytes before the memory: the number of mappings that other processes have \
        */
#define RECORDS 4096
#define DEVICES 8
#define MAGIC 0x63756461u

typedef struct {
  uint32_t magic;
  int32_t pid;
  char name[40];
  uint64_t bytes;
  uint64_t check; /* of all that is above; it sits at the end, so a handle cut or shifted anywhere
                     is noticed */
} handle_t;
_Static_assert(sizeof(handle_t) == 64, "a handle has 64 bytes, as CUDA's");

typedef struct {
  char reserved[64];
} cudaIpcMemHandle_t;

typedef struct {
  int used, imported, device, opened;
  char* map; /* of header and memory */
  char* base;
  size_t bytes;
  char name[40];
} record_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static record_t records[RECORDS];
static int serial, violations;
static size_t skew; /* cudaMalloc returns an address this far inside of its allocation */
static __thread int current_device;
static __thread int last_error;
static struct {
  char call[40];
  int after, times, code;
} failure;

static uint64_t sum(const handle_t* h) {
  uint64_t value = 1469598103934665603u;
  const unsigned char* bytes = (const unsigned char*)h;
  for (size_t i = 0; i < offsetof(handle_t, check); i++)
    value = (value ^ bytes[i]) * 1099511628211u;
  return value;
}

static void note(const char* call, const char* what) {
  const char* path = getenv("FAKE_CUDART_LOG");
  if (!path) return;
  int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  char line[160];
  int length = snprintf(line, sizeof line, "%d %s %s\n", (int)getpid(), call, what);
  if (write(fd, line, (size_t)length) != length) abort();
  close(fd);
}

static int done(int code) {
  if (code != SUCCESS) last_error = code;
  return code;
}

/* Returns the code that the test wants this call to fail with, else 0. */
static int ordered_failure(const char* call) {
  int code = 0;
  pthread_mutex_lock(&lock);
  if (strcmp(failure.call, call) == 0 && failure.after-- <= 0) {
    code = failure.code;
    if (--failure.times == 0) failure.call[0] = 0;
  }
  pthread_mutex_unlock(&lock);
  if (code) note(call, "fails");
  return code;
}

#define MAY_FAIL(call)                   \
  do {                                   \
    int ordered = ordered_failure(call); \
    if (ordered) return done(ordered);   \
  } while (0)

static record_t* slot(void) {
  for (int i = 0; i < RECORDS; i++)
    if (!records[i].used) return &records[i];
  return NULL;
}

/* The record that `address` lies in. */
static record_t* find(const void* address) {
  for (int i = 0; i < RECORDS; i++) {
    record_t* r = &records[i];
    if (r->used && (const char*)address >= r->base && (const char*)address < r->base + r->bytes)
      return r;
  }
  return NULL;
}

static atomic_int* mappings(record_t* r) { return (atomic_int*)r->map; }

/* The tests' own controls. */

/* Lets `call` succeed `after` times and then fail `times` times with `code`. */
void fake_fail(const char* call, int after, int times, int code) {
  snprintf(failure.call, sizeof failure.call, "%s", call);
  failure.after = after;
  failure.times = times;
  failure.code = code;
}

void fake_skew(size_t bytes) { skew = bytes; }

static int count(int imported) {
  int n = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < RECORDS; i++) n += records[i].used && records[i].imported == imported;
  pthread_mutex_unlock(&lock);
  return n;
}

int fake_allocations(void) { return count(0); }
int fake_imports(void) { return count(1); }
int fake_violations(void) { return violations; }

/* Unlinks what a test leaked on purpose; the mappings go with the process. */
void fake_forget(void) {
  for (int i = 0; i < RECORDS; i++)
    if (records[i].used && !records[i].imported) shm_unlink(records[i].name);
}

/* The runtime. */

const char* cudaGetErrorString(int code) {
  switch (code) {
    case SUCCESS:
      return "no error";
    case INVALID_VALUE:
      return "invalid argument";
    case MEMORY_ALLOCATION:
      return "out of memory";
    case INVALID_DEVICE:
      return "invalid device ordinal";
    case DEVICE_UNINITIALIZED:
      return "invalid device context";
    case MAP_FAILED_CODE:
      return "mapping of buffer object failed";
    case INVALID_HANDLE:
      return "invalid resource handle";
    case VIOLATION:
      return "rule broken (fake)";
    default:
      return "unrecognized error code";
  }
}

int cudaGetLastError(void) {
  int code = last_error;
  last_error = SUCCESS;
  return code;
}

int cudaPeekAtLastError(void) { return last_error; }

int cudaSetDevice(int device) {
  MAY_FAIL("cudaSetDevice");
  if (device < 0 || device >= DEVICES) return done(INVALID_DEVICE);
  current_device = device;
  return SUCCESS;
}

int cudaGetDevice(int* device) {
  MAY_FAIL("cudaGetDevice");
  *device = current_device;
  return SUCCESS;
}

int cudaGetDeviceCount(int* count) {
  *count = DEVICES;
  return SUCCESS;
}

int cudaDeviceSynchronize(void) {
  MAY_FAIL("cudaDeviceSynchronize");
  note("cudaDeviceSynchronize", "");
  return SUCCESS;
}

int cudaDeviceReset(void) {
  MAY_FAIL("cudaDeviceReset");
  return SUCCESS;
}

int cudaMalloc(void** pointer, size_t bytes) {
  MAY_FAIL("cudaMalloc");
  pthread_mutex_lock(&lock);
  record_t* r = slot();
  int code = MEMORY_ALLOCATION;
  if (r && bytes <= (size_t)1 << 32) {
    snprintf(r->name, sizeof r->name, "/comm-fake-%d-%d", (int)getpid(), serial++);
    size_t whole = HEADER + skew + bytes;
    int fd = shm_open(r->name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd >= 0 && ftruncate(fd, (off_t)whole) == 0) {
      r->map = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (r->map != MAP_FAILED) {
        r->used = 1;
        r->imported = 0;
        r->device = current_device;
        r->base = r->map + HEADER;
        r->bytes = skew + bytes;
        *pointer = r->base + skew;
        code = SUCCESS;
      }
    }
    if (fd >= 0) close(fd);
    if (code != SUCCESS) shm_unlink(r->name);
    note("cudaMalloc", r->name);
  }
  pthread_mutex_unlock(&lock);
  return done(code);
}

int cudaFree(void* pointer) {
  MAY_FAIL("cudaFree");
  if (!pointer) return SUCCESS;
  pthread_mutex_lock(&lock);
  record_t* r = find(pointer);
  int code = SUCCESS;
  if (!r || r->imported || r->device != current_device) {
    code = INVALID_VALUE;
  } else if (atomic_load(mappings(r)) != 0) {
    violations++;
    code = VIOLATION;
  } else {
    note("cudaFree", r->name);
    munmap(r->map, HEADER + r->bytes);
    shm_unlink(r->name);
    r->used = 0;
  }
  pthread_mutex_unlock(&lock);
  return done(code);
}

int cudaMemset(void* pointer, int value, size_t bytes) {
  MAY_FAIL("cudaMemset");
  record_t* r = find(pointer);
  if (!r || (char*)pointer + bytes > r->base + r->bytes) return done(INVALID_VALUE);
  memset(pointer, value, bytes);
  return SUCCESS;
}

int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  MAY_FAIL("cudaMemcpy");
  if (kind < 0 || kind > 4) return done(INVALID_VALUE);
  memcpy(to, from, bytes);
  return SUCCESS;
}

int cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* pointer) {
  MAY_FAIL("cudaIpcGetMemHandle");
  record_t* r = find(pointer);
  if (!r || r->imported || r->base != pointer) return done(INVALID_VALUE);
  handle_t h = {.magic = MAGIC, .pid = (int)getpid(), .bytes = r->bytes};
  memcpy(h.name, r->name, sizeof h.name);
  h.check = sum(&h);
  memcpy(out, &h, sizeof h);
  note("cudaIpcGetMemHandle", r->name);
  return SUCCESS;
}

int cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t in, unsigned flags) {
  MAY_FAIL("cudaIpcOpenMemHandle");
  handle_t h;
  memcpy(&h, &in, sizeof h);
  if (h.magic != MAGIC || h.check != sum(&h)) return done(INVALID_HANDLE);
  if (flags != 1) return done(INVALID_VALUE);
  if (h.pid == (int)getpid()) return done(DEVICE_UNINITIALIZED);
  pthread_mutex_lock(&lock);
  int code = MAP_FAILED_CODE;
  for (int i = 0; i < RECORDS && code != SUCCESS; i++) {
    record_t* r = &records[i];
    if (r->used && r->imported && strcmp(r->name, h.name) == 0) {
      r->opened++; /* as CUDA does: one mapping a handle, counted */
      *pointer = r->base;
      code = SUCCESS;
    }
  }
  record_t* r = slot();
  int fd = code == SUCCESS ? -1 : shm_open(h.name, O_RDWR, 0);
  if (r && fd >= 0) {
    r->map = mmap(NULL, HEADER + h.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (r->map != MAP_FAILED) {
      r->used = r->imported = r->opened = 1;
      r->device = current_device;
      r->base = r->map + HEADER;
      r->bytes = h.bytes;
      memcpy(r->name, h.name, sizeof r->name);
      atomic_fetch_add(mappings(r), 1);
      *pointer = r->base;
      code = SUCCESS;
    }
  }
  if (fd >= 0) close(fd);
  pthread_mutex_unlock(&lock);
  note("cudaIpcOpenMemHandle", h.name);
  return done(code);
}

int cudaIpcCloseMemHandle(void* pointer) {
  MAY_FAIL("cudaIpcCloseMemHandle");
  pthread_mutex_lock(&lock);
  record_t* r = find(pointer);
  int code = SUCCESS;
  if (!r || !r->imported || r->base != pointer || r->device != current_device) {
    code = INVALID_VALUE;
  } else if (--r->opened == 0) {
    note("cudaIpcCloseMemHandle", r->name);
    atomic_fetch_sub(mappings(r), 1);
    munmap(r->map, HEADER + r->bytes);
    r->used = 0;
  }
  pthread_mutex_unlock(&lock);
  return done(code);
}

static int address_range(uint64_t* base, size_t* bytes, uint64_t address) {
  record_t* r = find((void*)(uintptr_t)address);
  if (!r) return INVALID_VALUE;
  *base = (uint64_t)(uintptr_t)r->base;
  *bytes = r->bytes;
  return SUCCESS;
}

/* The driver's functions are had through the runtime; which of its two ways exists depends on the
 * CUDA version. */
#ifdef FAKE_CUDART_OLD
int cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                            int* status) {
#else
int cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                     unsigned long long flags, int* status) {
  if (version < 3020 || version > 13000) return done(INVALID_VALUE);
#endif
  MAY_FAIL(__func__);
  if (flags != 0) return done(INVALID_VALUE);
  int known = strcmp(symbol, "cuMemGetAddressRange") == 0;
  *function = known ? (void*)address_range : NULL;
  *status = known ? 0 : 1;
  return SUCCESS;
}
