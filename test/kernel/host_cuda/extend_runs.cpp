// Lists the runs of random work items on the host, with and without windows. The splits of a row tile list every KV
// token that a row sees, none twice; every row sees all of an unmasked tile; and no more tiles are listed than the rows
// need.
// Usage: extend_runs FIRST_SEED NUM_SEEDS
#include "extend_runs.cuh"

#include <random>

#include "check.h"

using namespace lazy::extend;

constexpr int BLOCK_N = 16;  // small, so that rows have many tiles

template <int PARTS>
void test(int seed) {
  std::mt19937 rng(seed);
  auto between = [&](int low, int high) { return low + int(rng() % unsigned(high - low + 1)); };
  // A request: segments, cached text and new text, each with positions that ascend strictly, with gaps or without.
  const int segments = between(0, 40), max_segments = segments + between(0, 3);
  std::vector<int> positions, ends(max_segments + 1, -1), offsets(max_segments + 1, -1), of_run;
  const bool gaps = between(0, 1);
  int position = between(0, 50);
  auto append = [&](int length, int run) {
    for (int i = 0; i < length; ++i) {
      positions.push_back(position), of_run.push_back(run);
      position += gaps && between(0, 9) == 0 ? between(2, 60) : 1;
    }
  };
  for (int i = 0; i < segments; ++i) {
    append(between(0, 3) ? between(1, 70) : 0, i);
    ends[i] = positions.size(), offsets[i] = 1000 + i;
  }
  const int end_of_chunks = position, num_chunk_tokens = positions.size();
  if (between(0, 1)) position = between(0, 40);  // text before and between the chunks
  append(between(0, 90), segments);
  const int begin_of_new = positions.size();
  if (between(0, 1)) position = end_of_chunks;
  append(between(1, 40), segments + 1);
  const int length = positions.size();
  // In cross attention, any number of queries, which are not tokens of the row and see all of it.
  const bool cross = PARTS == 1 && between(0, 3) == 0;
  std::vector<int> queries(positions.begin() + begin_of_new, positions.end());
  if (cross) queries.assign(between(1, 2 * length), 1 << 30);
  const int qo_length = queries.size();

  const int qo_indptr[] = {0, qo_length}, kv_indptr[] = {0, length};
  ExtendRows p{};
  p.qo_indptr = qo_indptr, p.kv_indptr = kv_indptr, p.num_segments = &segments;
  p.kv_positions = positions.data(), p.segment_ends = ends.data(), p.segment_offsets = offsets.data();
  p.q_positions = queries.data();
  p.max_segments = max_segments;
  p.window = PARTS == 1 ? INT_MAX : between(0, 3) ? between(1, 60) : between(1, 2000);
  WorkItem item{};
  item.qo_length = qo_length, item.num_splits = between(0, 1) ? 1 : between(2, 9);
  const int first = between(0, qo_length - 1), last = std::min(first + between(0, 15), qo_length - 1);

  std::vector<int> listed(length), walked;
  int tiles_listed = 0;
  for (item.split = 0; item.split < item.num_splits; ++item.split) {
    std::vector<Run> runs(PARTS * (max_segments + 2) + 1);
    int2 counts[32];
    run_warp([&](int lane) { counts[lane] = list_runs<BLOCK_N, PARTS>(p, item, first, last, runs.data(), lane); });
    tiles_listed += counts[0].y;
    if (counts[0].y == 0) continue;
    TileCursor tile(runs.data());
    for (int n = 0; n < counts[0].y; ++n) {
      if (n > 0) tile.advance<BLOCK_N>();
      const int begin = tile.run.begin, end = std::min(begin + BLOCK_N, tile.run.end);
      CHECK(begin < end, "an empty tile");
      CHECK(begin >= 0, "a tile before the row");
      for (int i = begin; i < end; ++i) {
        ++listed[i];
        const int run = of_run[i];
        CHECK(run == of_run[begin] || cross && begin >= num_chunk_tokens, "a tile of two runs");
        CHECK(tile.run.offset == (run < segments ? 1000 + run : 0), "a wrong offset");
        for (int row = first; row <= last && !tile.masked<BLOCK_N>(); ++row) {
          const int q = queries[row];
          CHECK(positions[i] <= q && positions[i] > int64_t(q) - p.window, "hidden from a row, but not masked");
        }
      }
    }
  }
  int seen = 0, runs_seen = 0;
  for (int i = 0; i < length; ++i) {
    bool visible = false;
    for (int row = first; row <= last; ++row) {
      const int q = queries[row];
      visible |= positions[i] <= q && positions[i] > int64_t(q) - p.window;
    }
    CHECK(listed[i] <= 1, "token %d is listed %d times", i, listed[i]);
    CHECK(listed[i] || !visible, "token %d is left out", i);
    seen += visible;
    runs_seen += visible && (i == 0 || of_run[i] != of_run[i - 1] || !listed[i - 1]);
  }
  // Rows far apart, on both sides of a chunk, also list what is between their windows.
  const int apart = queries[last] - queries[first] - (last - first);
  if (!gaps && apart == 0) {
    CHECK(tiles_listed <= seen / BLOCK_N + 2 * runs_seen, "%d tiles for %d tokens", tiles_listed, seen);
  }
}

int main(int, char** arguments) {
  const int first = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
  for (int seed = first; seed < first + count; ++seed) test<1>(seed), test<2>(seed);
}
