// Merges random splits on the host, for head_dim 64, 128 and 256, against the formula in float64. A split that saw
// nothing has lse = -inf and rows of NaN.
// Usage: merge_splits FIRST_SEED NUM_SEEDS
#include "merge_splits.cuh"

#include <cstdio>
#include <cstdlib>
#include <random>

template <int HEAD_DIM>
void test(int seed) {
  constexpr int VECTOR = HEAD_DIM / 32;
  std::mt19937 rng(seed);
  auto between = [&](int low, int high) { return low + int(rng() % unsigned(high - low + 1)); };
  std::normal_distribution<float> normal;
  const int num_splits = between(0, 1) ? between(1, 40) : between(1, 140), stride = between(1, 3);
  const int rare = between(1, 4), before = between(0, 2);
  std::vector<float> rows((before + num_splits * stride) * HEAD_DIM, NAN), lse(before + num_splits * stride, NAN);
  double highest = -INFINITY, sum = 0.0, expected[HEAD_DIM] = {};
  for (int i = 0; i < num_splits; ++i) {
    const bool saw = between(1, rare) == 1;
    lse[before + i * stride] = saw ? 20.0f * normal(rng) : -INFINITY;
    if (!saw) continue;
    highest = std::max(highest, double(lse[before + i * stride]));
    for (int j = 0; j < HEAD_DIM; ++j) rows[(before + i * stride) * HEAD_DIM + j] = normal(rng);
  }
  for (int i = 0; i < num_splits; ++i) {
    if (lse[before + i * stride] == -INFINITY) continue;
    const double weight = std::exp2(lse[before + i * stride] - highest);
    sum += weight;
    for (int j = 0; j < HEAD_DIM; ++j) expected[j] += weight * rows[(before + i * stride) * HEAD_DIM + j];
  }
  float merged[HEAD_DIM], sums[32], highests[32];
  run_warp([&](int lane) {
    float acc[VECTOR] = {}, sum = 0.0f, highest = -INFINITY;
    lazy::merge_splits(rows.data(), lse.data(), before, stride, num_splits, lane, acc, sum, highest);
    for (int j = 0; j < VECTOR; ++j) merged[lane * VECTOR + j] = acc[j];
    sums[lane] = sum, highests[lane] = highest;
  });
  auto check = [&](bool right, const char* what) {
    if (right) return;
    std::printf("seed %d, heads of %d, %d splits: %s\n", seed, HEAD_DIM, num_splits, what);
    std::exit(1);
  };
  for (int lane = 0; lane < 32; ++lane) {
    check(highests[lane] == float(highest), "wrong maximum");
    check(std::abs(sums[lane] - sum) <= 1e-5 * sum, "wrong sum of weights");
  }
  for (int j = 0; j < HEAD_DIM; ++j) check(std::abs(merged[j] - expected[j]) <= 1e-5 * (1.0 + sum), "wrong row");
}

int main(int, char** arguments) {
  const int first = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
  for (int seed = first; seed < first + count; ++seed) test<64>(seed), test<128>(seed), test<256>(seed);
}
