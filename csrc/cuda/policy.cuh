// Tuning constants of the kernels, each with its reason. None has been measured on a GPU yet: benchmarks/on_gpu.sh
// is how to.
#pragma once

namespace fastamp {

struct StreamPolicy {
  // Threads of a block: eight warps hide latency well and leave a register budget of 64 a thread at full occupancy
  // (65,536 registers / 1,024 threads on 7.5; 2,048 threads on the others leave 32, at which half occupancy serves).
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  // Blocks that must fit a multiprocessor, where a kernel needs to be told: leaves 64 registers a thread. Untold, the
  // compiler aims at 32 on some architectures, and spills.
  static constexpr int kResidentBlocks = 4;
  // 128-bit loads in flight a thread: 4 x 16 bytes x 2,048 threads = 128 KiB a multiprocessor, above the bandwidth x
  // latency of every part from V100 to H200 (about 40 to 64 KiB).
  static constexpr int kUnroll = 4;
  // The unit in which work is shared out: one pass of a block's threads. Smaller ones would leave threads idle at
  // the ends of tensors, larger ones would balance worse.
  static constexpr int kChunkBytes = kThreads * kUnroll * 16;
  // Blocks of a launch, at most. Fixed, rather than a multiple of the multiprocessors at hand, so that the order of
  // every sum is the same on every GPU; several times what any GPU runs at once, so that the last wave is short.
  static constexpr int kMaxBlocks = 4096;
};

}  // namespace fastamp
