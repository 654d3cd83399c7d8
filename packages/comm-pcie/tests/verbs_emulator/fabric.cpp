// The shared file: made, mapped, locked; rules; what tests call (emu_*).
#include "fabric.h"

#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sstream>
#include <string>

namespace emu {

namespace {

Fabric* mapped;
char mapped_path[256];

const char* const kVerbNames[kNumVerbs] = {"write",      "write_imm", "umr",          "post_recv",
                                           "open",       "alloc_pd",  "reg_mr",       "reg_dmabuf",
                                           "create_cq",  "create_qp", "create_mkey",  "modify_qp",
                                           "destroy_qp", "dereg_mr",  "destroy_mkey", "destroy_cq",
                                           "dealloc_pd", "close",     "poll"};
const char* const kActionNames[kNumActions] = {"fail", "delay",  "hold", "drop",
                                               "lose", "status", "late", "not_ready"};

int find_name(const char* const* names, int count, const std::string& name) {
  for (int name_idx = 0; name_idx < count; ++name_idx)
    if (name == names[name_idx]) return name_idx;
  return -1;
}

int find_nic(const Fabric* shared, const std::string& name) {
  for (uint32_t nic_idx = 0; nic_idx < shared->num_nics; ++nic_idx)
    if (name == shared->nics[nic_idx].name) return static_cast<int>(nic_idx);
  return -1;
}

bool parse_hex(const std::string& text, uint8_t* raw, size_t count) {
  if (text.size() != 2 * count) return false;
  for (size_t byte_idx = 0; byte_idx < count; ++byte_idx) {
    unsigned value = 0;
    if (sscanf(text.c_str() + 2 * byte_idx, "%2x", &value) != 1) return false;
    raw[byte_idx] = static_cast<uint8_t>(value);
  }
  return true;
}

Fabric* map(int file) {
  void* memory =
      mmap(nullptr, sizeof(Fabric), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Fabric*>(memory);
}

bool parse_line(Fabric* shared, const std::string& line) {
  std::istringstream words(line);
  std::string kind, name;
  words >> kind;
  if (kind.empty()) return true;
  if (kind == "copies") return static_cast<bool>(words >> shared->copies);
  if (kind == "shuffle") return static_cast<bool>(words >> shared->shuffle);
  words >> name;
  if (kind == "nic" && shared->num_nics < kNics && name.size() < sizeof(Nic::name)) {
    Nic& nic = shared->nics[shared->num_nics++];
    snprintf(nic.name, sizeof(nic.name), "%s", name.c_str());
    return static_cast<bool>(words >> nic.is_mlx5 >> nic.has_interleaved >> nic.has_dmabuf >>
                             nic.port_state >> nic.link_layer >> nic.active_mtu >> nic.numa >>
                             nic.max_msg_sz);
  }
  const int nic_idx = find_nic(shared, name);
  if (kind != "gid" || nic_idx < 0) return false;
  uint32_t index = 0, type = 0, ifindex = 0;
  std::string raw;
  if (!(words >> index >> type >> ifindex >> raw) || index >= kGids) return false;
  Gid& gid = shared->nics[nic_idx].gids[index];
  gid.type = type;
  gid.ifindex = ifindex;
  gid.used = 1;
  return parse_hex(raw, gid.raw, sizeof(gid.raw));
}

}  // namespace

const char* fabric_path() { return mapped_path; }

Fabric* fabric() {
  static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&once);
  const char* path = getenv("VERBS_EMULATOR");
  if (path != nullptr && path[0] != '\0' && strcmp(path, mapped_path) != 0) {
    // A test that has made a new fabric; the old mapping stays, as objects in it may be in use.
    const int file = open(path, O_RDWR | O_CLOEXEC);
    Fabric* found = file < 0 ? nullptr : map(file);
    if (file >= 0) close(file);
    if (found != nullptr && found->magic == kMagic && found->size == sizeof(Fabric)) {
      mapped = found;
      snprintf(mapped_path, sizeof(mapped_path), "%s", path);
    }
  }
  Fabric* result = path == nullptr || path[0] == '\0' ? nullptr : mapped;
  pthread_mutex_unlock(&once);
  return result;
}

Lock::Lock(Fabric* fabric) : fabric_(fabric) {
  // Its owner may have been killed: every change below is complete or harmless.
  if (pthread_mutex_lock(&fabric->lock) == EOWNERDEAD) pthread_mutex_consistent(&fabric->lock);
}

Lock::~Lock() { pthread_mutex_unlock(&fabric_->lock); }

int refuse(int error, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(mapped->problem, sizeof(mapped->problem), format, arguments);
  va_end(arguments);
  return error;
}

Rule* match(Verb verb, uint32_t nic, int32_t peer) {
  for (Rule& rule : mapped->rules) {
    if (!rule.used || rule.verb != verb) continue;
    if (rule.nic >= 0 && rule.nic != static_cast<int32_t>(nic)) continue;
    if (rule.peer >= 0 && rule.peer != peer) continue;
    if (rule.seen++ < rule.after || (rule.count != 0 && rule.fired >= rule.count)) continue;
    ++rule.fired;
    return &rule;
  }
  return nullptr;
}

int ordered_error(Verb verb, uint32_t nic) {
  ++mapped->counters.posted[verb];
  const Rule* rule = match(verb, nic, -1);
  return rule == nullptr ? 0 : refuse(static_cast<int>(rule->value), "ordered: %s", rule->text);
}

void event_path(uint32_t context, char* path, size_t size) {
  snprintf(path, size, "%s.events%u", mapped_path, context);
}

void send_event(uint32_t context, uint32_t type, int32_t qp, int32_t cq, int32_t port) {
  char path[300];
  event_path(context, path, sizeof(path));
  const int pipe = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
  if (pipe < 0) return;  // its process is gone
  const EventRecord record = {type, qp, cq, port};
  if (write(pipe, &record, sizeof(record)) == sizeof(record)) ++mapped->counters.events;
  close(pipe);
}

}  // namespace emu

// -- For tests ------------------------------------------------------------------------------------

// Make a fabric at `path` from lines of text; returns 0, or the number of the line that is wrong,
// or -errno.
EXPORT int emu_create(const char* path, const char* text) {
  const int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return -errno;
  emu::Fabric* shared = ftruncate(file, sizeof(emu::Fabric)) == 0 ? emu::map(file) : nullptr;
  const int error = errno;
  close(file);
  if (shared == nullptr) return -error;
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&shared->lock, &kind);
  pthread_mutexattr_destroy(&kind);
  shared->copies = 1;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number)
    if (!emu::parse_line(shared, line)) return number;
  shared->size = sizeof(emu::Fabric);
  shared->magic = emu::kMagic;
  munmap(shared, sizeof(emu::Fabric));
  return 0;
}

// Add a rule: "ACTION verb=V [nic=N] [peer=N] [value=K] [after=K] [count=K]". Returns its number,
// or -1 with the reason: a rule that can't fire is refused.
EXPORT int emu_rule(const char* text, char* why, size_t size) {
  emu::Fabric* shared = emu::fabric();
  if (shared == nullptr) return snprintf(why, size, "there is no fabric"), -1;
  emu::Lock lock(shared);
  emu::Rule rule = {};
  rule.nic = rule.peer = -1;
  rule.count = 1;
  std::istringstream words(text);
  std::string word;
  words >> word;
  const int action = emu::find_name(emu::kActionNames, emu::kNumActions, word);
  if (action < 0) return snprintf(why, size, "no action %s", word.c_str()), -1;
  rule.action = static_cast<uint32_t>(action);
  int verb = -1;
  bool has_value = false;
  while (words >> word) {
    const size_t equal = word.find('=');
    if (equal == std::string::npos) return snprintf(why, size, "no '=': %s", word.c_str()), -1;
    const std::string name = word.substr(0, equal), value = word.substr(equal + 1);
    char* end = nullptr;
    const unsigned long number = strtoul(value.c_str(), &end, 0);
    const bool numeric = !value.empty() && *end == '\0';
    if (name == "verb") {
      verb = emu::find_name(emu::kVerbNames, emu::kNumVerbs, value);
      if (verb < 0) return snprintf(why, size, "no verb %s", value.c_str()), -1;
    } else if (name == "nic" || name == "peer") {
      const int found = emu::find_nic(shared, value);
      if (found < 0) return snprintf(why, size, "no NIC %s", value.c_str()), -1;
      (name == "nic" ? rule.nic : rule.peer) = found;
    } else if (numeric && (name == "value" || name == "after" || name == "count")) {
      (name == "value"   ? rule.value
       : name == "after" ? rule.after
                         : rule.count) = static_cast<uint32_t>(number);
      has_value = has_value || name == "value";
    } else {
      return snprintf(why, size, "no selector %s", word.c_str()), -1;
    }
  }
  if (verb < 0) return snprintf(why, size, "a rule needs verb="), -1;
  rule.verb = static_cast<uint32_t>(verb);
  const bool is_write = verb == emu::kWrite || verb == emu::kWriteImm;
  const bool is_data = is_write || verb == emu::kUmr;
  const bool can_fire = action == emu::kFail ? has_value && rule.value != 0
                        : action == emu::kLate
                            ? is_write && rule.value >= 1 && rule.value <= emu::kWithheldBytes
                        : action == emu::kNotReady ? verb == emu::kWriteImm
                        : action == emu::kStatus   ? is_data && rule.value != 0
                        : action == emu::kDelay    ? is_data && rule.value != 0
                                                   : is_data;
  if (!can_fire || (rule.peer >= 0 && !is_write))
    return snprintf(why, size, "it can't fire: %s with verb %s, value %u%s",
                    emu::kActionNames[action], emu::kVerbNames[verb], rule.value,
                    rule.peer >= 0 ? " and a peer" : ""),
           -1;
  snprintf(rule.text, sizeof(rule.text), "%s", text);
  for (int rule_idx = 0; rule_idx < emu::kRules; ++rule_idx) {
    if (shared->rules[rule_idx].used) continue;
    rule.used = 1;
    shared->rules[rule_idx] = rule;
    return rule_idx;
  }
  return snprintf(why, size, "there are %d rules already", emu::kRules), -1;
}
