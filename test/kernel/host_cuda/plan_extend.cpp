// Plans random prefill batches on the host and collects the work items of all blocks: together they must cover every
// row tile and split once, and blocks that take them in turn must finish together. Divides by known numbers as well.
// Usage: plan_extend FIRST_SEED NUM_SEEDS
#include "plan_extend.cuh"

#include <climits>
#include <map>
#include <queue>
#include <random>
#include <set>
#include <tuple>

#include "check.h"

using namespace lazy::extend;

template <bool SPLIT_ONLY>
bool find(const ExtendBatch& batch, int index, WorkItem& item) {
  WorkItem items[32];
  run_warp([&](int lane) { items[lane].find<128, 128, SPLIT_ONLY>(batch, index, lane); });
  item = items[0];
  return item.num_splits > 0;
}

// The time when the last block ends, if each takes the next item as soon as it has finished one.
float makespan(const std::vector<float>& items, int blocks) {
  std::priority_queue<float, std::vector<float>, std::greater<float>> ends;
  for (int i = 0; i < blocks; ++i) ends.push(0.0f);
  float last = 0.0f;
  for (float item : items) {
    const float end = ends.top() + item;
    ends.pop(), ends.push(end), last = std::max(last, end);
  }
  return last;
}

// On both sides of random multiples, and at the ends.
void test_divisor(int seed) {
  std::mt19937 rng(seed);
  for (int value : {1, 2, 3, 5, 7, 8, 12, 64, 96, 1 + int(rng() % 1000), 1 + int(rng() % INT_MAX)}) {
    const Divisor divisor(value);
    const int multiple = rng() % (INT_MAX / value + 1u) * value;
    for (int n : {0, 1, std::max(multiple - 1, 0), multiple, INT_MAX - 1, INT_MAX, int(rng() % INT_MAX)}) {
      CHECK(n / divisor == n / value && n % divisor == n % value, "%d by %d is not %d", n, value, n / divisor);
    }
  }
}

void test(int seed) {
  std::mt19937 rng(seed);
  auto between = [&](int low, int high) { return low + int(rng() % unsigned(high - low + 1)); };
  auto one_of = [&](auto... values) { return std::vector<int>{values...}[between(0, sizeof...(values) - 1)]; };
  ExtendBatch batch{};
  batch.bs = one_of(1, 2, between(3, 12), 32, 33, between(40, 70));
  batch.group = one_of(1, 2, 4);
  batch.num_kv_heads = one_of(1, 2);
  batch.num_sms = one_of(7, 132);
  batch.window = one_of(INT_MAX, INT_MAX, 128, 4096);
  const int longest = one_of(100, 3000, 30000), alike = between(0, 2) == 0;
  std::vector<int> qo_indptr{0}, kv_indptr{0}, num_segments;
  int unsplit = 0;
  for (int b = 0; b < batch.bs; ++b) {
    const int qo_length = alike ? 60 : one_of(0, 1, between(1, 40), between(1, 200));
    qo_indptr.push_back(qo_indptr.back() + qo_length);
    kv_indptr.push_back(kv_indptr.back() + qo_length + (alike ? longest : between(0, one_of(100, longest))));
    num_segments.push_back(alike ? 5 : between(0, 20));
    unsplit += (qo_length * batch.group + 127) / 128 * batch.num_kv_heads;
  }
  batch.qo_indptr = qo_indptr.data(), batch.kv_indptr = kv_indptr.data(), batch.num_segments = num_segments.data();
  // From 33 requests on, the plan relies on having all the room.
  const bool all_room = batch.bs > 32 || between(0, 1);
  batch.max_items = unsplit + (all_room ? batch.num_sms : between(0, batch.num_sms));
  batch.max_partials = between(0, 5) == 0 ? 0 : all_room ? 2 * batch.num_sms : between(2, batch.num_sms);

  using RowTile = std::tuple<int, int, int>;
  std::map<RowTile, std::map<int, WorkItem>> row_tiles;
  std::set<int> partials;
  std::vector<float> lengths, unsplit_lengths;
  bool ended = false, any_split = false;
  for (int index = 0; index <= batch.max_items; ++index) {
    WorkItem item;
    if (!find<false>(batch, index, item)) {
      ended = true;
      continue;
    }
    CHECK(!ended, "item %d comes after the last one", index);
    auto& splits = row_tiles[{item.b, item.kv_head, item.tile}];
    CHECK(splits.emplace(item.split, item).second, "item %d repeats an earlier one", index);
    CHECK(item.qo_begin == qo_indptr[item.b] && item.qo_length == qo_indptr[item.b + 1] - item.qo_begin, "wrong rows");
    CHECK(item.split >= 0 && item.split < item.num_splits, "split %d of %d", item.split, item.num_splits);
    const int qo_length = item.qo_length, kv_length = kv_indptr[item.b + 1] - kv_indptr[item.b];
    CHECK(item.row_tiles == (qo_length * batch.group + 127) / 128 && item.tile < item.row_tiles, "wrong row tiles");
    if (item.num_splits > 1) {
      any_split = true;
      CHECK(partials.insert(item.partial).second, "item %d shares its partial rows", index);
      CHECK(item.partial >= 0 && item.partial < batch.max_partials, "no room for partial rows");
    }
    const int seen = kv_length - qo_length / 2, in_window = batch.window / 128 + (128 / batch.group + 127) / 128 + 1;
    const float tiles = seen <= batch.window ? (seen + 127) / 128 + num_segments[item.b] / 2 + 1 : in_window;
    lengths.push_back(tiles / item.num_splits + 2);
    if (item.split == 0) unsplit_lengths.push_back(tiles + 2);
    CHECK(batch.bs > 32 || lengths.back() <= lengths[lengths.size() - 2 + (lengths.size() == 1)] + 1e-3f,
          "item %d is longer than the one before", index);
  }
  CHECK(ended, "more items than there is room for");
  CHECK(int(row_tiles.size()) == unsplit, "%d of %d row tiles", int(row_tiles.size()), unsplit);
  int merged = 0;
  for (const auto& [row_tile, splits] : row_tiles) {
    const WorkItem& first = splits.begin()->second;
    CHECK(int(splits.size()) == first.num_splits, "%d of %d splits", int(splits.size()), first.num_splits);
    for (const auto& [split, item] : splits) {
      CHECK(item.partial == first.partial + split * item.row_tiles, "partial rows are not where the first split says");
    }
    merged += first.num_splits > 1;
  }
  std::set<RowTile> seen;
  for (int index = 0; index <= merged; ++index) {
    WorkItem item;
    CHECK(find<true>(batch, index, item) == (index < merged), "%d row tiles to merge, not %d", merged, index);
    if (index == merged) break;
    const RowTile row_tile{item.b, item.kv_head, item.tile};
    CHECK(seen.insert(row_tile).second, "a row tile is merged twice");
    const WorkItem& first = row_tiles.at(row_tile).at(0);
    CHECK(first.num_splits == item.num_splits && first.partial == item.partial && first.num_splits > 1, "another plan");
  }
  if (batch.max_partials == 0) return;
  const float end = makespan(lengths, batch.num_sms) + 2 * any_split;
  // More than 32 requests are ordered in groups of 32.
  if (batch.bs <= 32) std::sort(unsplit_lengths.begin(), unsplit_lengths.end(), std::greater<float>());
  const float unsplit_end = makespan(unsplit_lengths, batch.num_sms);
  CHECK(end <= 1.1f * unsplit_end + 3.0f, "%.1f tiles, and %.1f without splits", end, unsplit_end);
  float work = 0.0f;
  for (float length : unsplit_lengths) work += length;
  const float longest_item = unsplit > 0 ? *std::max_element(unsplit_lengths.begin(), unsplit_lengths.end()) : 0.0f;
  const bool one_is_long = longest_item > 3 * work / batch.num_sms + 12;
  if (one_is_long && all_room) {
    CHECK(end <= 0.7f * unsplit_end, "%.1f tiles, and %.1f without splits: the longest request is too long", end,
          unsplit_end);
  }
}

int main(int, char** arguments) {
  const int first = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
  for (int seed = first; seed < first + count; ++seed) test_divisor(seed), test(seed);
}
