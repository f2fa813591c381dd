// What a torch without CUDA lacks to have tensors of such a device: a guard, and hooks that say there is one. To be
// loaded before torch, whose own answers these take the place of.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <mutex>
#include <set>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)

// Memory of the CPU, with a list of what is in use.
struct PinnedMemory final : c10::Allocator {
  std::mutex mutex;
  std::set<const void*> used;
  static PinnedMemory& get() {
    static auto* memory = new PinnedMemory;  // tensors may outlive what is static
    return *memory;
  }
  static void release(void* data) {
    {
      const std::lock_guard<std::mutex> lock(get().mutex);
      get().used.erase(data);
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(size);
    const std::lock_guard<std::mutex> lock(mutex);
    used.insert(data);
    return {data, data, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
  bool has(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex);
    return used.count(data) > 0;
  }
};

struct PretendedHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::get().has(data); }
};

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static const PretendedHooks hooks;
  return hooks;
}
}

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}
}
