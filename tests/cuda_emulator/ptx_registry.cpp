// Linked into a build of translated PTX: makes every emulated launch run what nvcc emitted for that kernel, instead
// of the kernel as g++ compiled it. The two are matched by mangled name.
#include <map>
#include <stdexcept>
#include <string>

#include <dlfcn.h>

#include "ptx_runtime.h"

namespace {

std::map<std::string, cuda_emulator::PtxEntry>& entries() {
  static std::map<std::string, cuda_emulator::PtxEntry> all;
  return all;
}

cuda_emulator::PtxEntry find_entry(const void* kernel) {
  Dl_info info;
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr || info.dli_saddr != kernel) {
    throw std::runtime_error("CUDA emulator: a kernel without a symbol was launched: is it static?");
  }
  const auto found = entries().find(info.dli_sname);
  if (found == entries().end()) {
    throw std::runtime_error(std::string("CUDA emulator: the PTX has no entry ") + info.dli_sname);
  }
  return found->second;
}

[[maybe_unused]] const bool ready = [] {
  cuda_emulator::find_ptx_entry = find_entry;
  return true;
}();

}  // namespace

ptx::Registration::Registration(const char* name, cuda_emulator::PtxEntry entry) { entries()[name] = entry; }

// How many kernels the PTX holds, so that a test can tell that it is PTX that ran.
extern "C" int cuda_emulator_ptx_entries() { return static_cast<int>(entries().size()); }
