// Native core of topo-opt: graph algorithms on plain arrays. Meanings and rules are documented in sim/__init__.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace {

// Kinds of node, the same numbers as in sim/__init__.py.
enum Kind : int { kPointwise = 0, kReduction = 1, kContraction = 2, kAttention = 3, kUpdate = 4, kScan = 5, kFixed = 6 };

// How a consumer reads a producer, the same numbers as in sim/__init__.py. kRow + k: its row, in row order k.
enum Alignment : int { kSame = 0, kPermuted = 1, kOther = 2, kRow = 3 };

struct Edge {
  int source, target, alignment;
  int64_t bytes;
};

struct Cluster {
  int kind;
  int64_t rows, cols;
  int order;        // row order of a reduction
  int first, last;  // smallest and largest node index
  int size = 1;
  int leaves = 0;  // distinct values read from memory, an upper bound
};

class Clustering {
 public:
  Clustering(std::vector<int> kinds, std::vector<int64_t> rows, std::vector<int64_t> cols, std::vector<int> orders,
             std::vector<int> costs, std::vector<int> inputs, std::vector<int> held, std::vector<Edge> edges, int max_inputs, int64_t recompute)
      : held_(std::move(held)), costs_(std::move(costs)), edges_(std::move(edges)), max_inputs_(max_inputs), recompute_(recompute) {
    const int n = static_cast<int>(kinds.size());
    parent_.resize(n);
    std::iota(parent_.begin(), parent_.end(), 0);
    in_.resize(n);
    out_.resize(n);
    for (int i = 0; i < n; ++i) clusters_.push_back({kinds[i], rows[i], cols[i], orders[i], i, i, 1, inputs[i]});
    for (int e = 0; e < static_cast<int>(edges_.size()); ++e) {
      if (edges_[e].source >= edges_[e].target) throw std::invalid_argument("edges must go forward in node order");
      in_[edges_[e].target].push_back(e);
      out_[edges_[e].source].push_back(e);
    }
    visited_.assign(n, 0);
    members_.resize(n);
    for (int i = 0; i < n; ++i) members_[i] = {i};
  }

  std::vector<int> run() {
    const int n = static_cast<int>(parent_.size());
    for (int node = 0; node < n; ++node) {
      // Heaviest edge first: the value whose round trip through memory costs most.
      std::vector<int> order = in_[node];
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return edges_[a].bytes > edges_[b].bytes; });
      for (int e : order) try_merge(find(edges_[e].source), find(node));
    }
    std::vector<int> label(n);
    for (int i = 0; i < n; ++i) label[i] = find(i);
    return label;
  }

 private:
  int find(int x) {
    while (parent_[x] != x) x = parent_[x] = parent_[parent_[x]];
    return x;
  }

  // The edges between two clusters decide whether the consumer can keep what the producer computes in registers.
  void try_merge(int a, int b) {
    if (a == b) return;
    const Cluster &p = clusters_[a], &c = clusters_[b];
    const int row = kRow + (p.kind == kReduction ? p.order : c.order);
    bool all_same = true, all_row = true, only_user = true, permuted = true;
    int64_t reads = 0;
    for (int m : members_[a]) {
      if (held_[m]) only_user = false;
      for (int e : out_[m]) {
        const int to = find(edges_[e].target);
        if (to == a) continue;
        if (to != b) {
          only_user = false;
          continue;
        }
        const int alignment = edges_[e].alignment;
        all_same &= alignment == kSame;
        all_row &= alignment == kSame || alignment == row;
        permuted &= alignment == kSame || alignment == kPermuted;
        ++reads;
      }
    }
    if (reads == 0 || p.leaves + c.leaves > max_inputs_) return;
    int kind;
    int64_t rows, cols;
    if (is_anchor(p.kind) && !only_user && belongs_to_reader(b)) return;
    if (!compatible(p, c, a, all_same, all_row, permuted, only_user, kind, rows, cols)) return;
    if (creates_cycle(a, b)) return;
    merge(a, b, kind, rows, cols);
  }

  bool compatible(const Cluster &p, const Cluster &c, int a, bool all_same, bool all_row, bool permuted, bool only_user,
                  int &kind, int64_t &rows, int64_t &cols) {
    kind = c.kind, rows = c.rows, cols = c.cols;
    if (p.kind == kFixed || c.kind == kFixed || c.kind == kScan || p.kind == kScan || p.kind == kUpdate) return false;
    const int64_t full = c.rows * c.cols;
    if (p.kind == kPointwise) {
      if (c.kind == kPointwise && all_same && p.rows == c.rows) return true;
      if (c.kind == kReduction && all_same && (p.rows == full || p.rows == c.rows)) return true;
      if (c.kind == kUpdate) return only_user && all_same;
      // Recomputing a cheap producer where it is read costs less than a trip through memory.
      const bool cheap = cost(a) * std::max<int64_t>(1, full / std::max<int64_t>(1, p.rows)) <= recompute_;
      return only_user && cheap && (c.kind == kPointwise || c.kind == kReduction);
    }
    if (p.kind == kReduction) {
      kind = kReduction, rows = p.rows, cols = p.cols;
      if (c.kind == kPointwise) return (all_same && c.rows == p.rows) || (all_row && c.rows == p.rows * p.cols);
      return c.kind == kReduction && all_row && c.rows == p.rows && c.cols == p.cols && c.order == p.order;
    }
    // A contraction or attention takes pointwise consumers as its epilogue.
    kind = p.kind, rows = p.rows, cols = p.cols;
    return c.kind == kPointwise && permuted && c.rows == p.rows;
  }

  static bool is_anchor(int kind) { return kind == kContraction || kind == kAttention; }

  // The producer's result goes to memory anyway: a lone element-wise op is better off with its one reader, which can
  // read that result instead of this op's.
  bool belongs_to_reader(int b) {
    if (members_[b].size() != 1) return false;
    int readers = 0;
    bool fuses = false;
    for (int e : out_[members_[b][0]]) {
      const Cluster &reader = clusters_[find(edges_[e].target)];
      ++readers;
      fuses = edges_[e].alignment == kSame && (reader.kind == kPointwise || reader.kind == kReduction);
    }
    return readers == 1 && fuses;
  }

  int64_t cost(int a) {
    int64_t total = 0;
    for (int m : members_[a]) total += costs_[m];
    return total;
  }

  // Merging is illegal when a path leaves the producer and comes back into the consumer through a third cluster.
  bool creates_cycle(int a, int b) {
    ++stamp_;
    const int limit = clusters_[b].last;
    std::vector<int> stack;
    auto push_successors = [&](int cluster, bool skip_b) {
      for (int m : members_[cluster])
        for (int e : out_[m]) {
          const int to = find(edges_[e].target);
          if (to == cluster || (skip_b && to == b) || visited_[to] == stamp_ || clusters_[to].first > limit) continue;
          visited_[to] = stamp_;
          stack.push_back(to);
        }
    };
    push_successors(a, true);
    while (!stack.empty()) {
      const int top = stack.back();
      stack.pop_back();
      if (top == b) return true;
      if (top == a) continue;
      push_successors(top, false);
    }
    return false;
  }

  void merge(int a, int b, int kind, int64_t rows, int64_t cols) {
    if (members_[a].size() < members_[b].size()) std::swap(a, b);
    parent_[b] = a;
    Cluster &x = clusters_[a];
    const Cluster &y = clusters_[b];
    const int order = x.kind == kReduction ? x.order : y.order;
    x = {kind, rows, cols, order, std::min(x.first, y.first), std::max(x.last, y.last), x.size + y.size, x.leaves + y.leaves};
    members_[a].insert(members_[a].end(), members_[b].begin(), members_[b].end());
    members_[b].clear();
  }

  std::vector<int> held_, costs_;
  std::vector<Edge> edges_;
  int max_inputs_;
  int64_t recompute_;
  std::vector<Cluster> clusters_;
  std::vector<int> parent_, visited_;
  std::vector<std::vector<int>> in_, out_, members_;
  int stamp_ = 0;
};

std::vector<int> cluster(std::vector<int> kinds, std::vector<int64_t> rows, std::vector<int64_t> cols,
                         std::vector<int> orders, std::vector<int> costs, std::vector<int> inputs, std::vector<int> held, std::vector<int> sources,
                         std::vector<int> targets, std::vector<int> alignments, std::vector<int64_t> bytes,
                         int max_inputs, int64_t recompute) {
  const size_t n = kinds.size(), m = sources.size();
  if (rows.size() != n || cols.size() != n || orders.size() != n || costs.size() != n || inputs.size() != n ||
      held.size() != n)
    throw std::invalid_argument("kinds, rows, cols, orders, costs, inputs and held must have one entry a node");
  if (targets.size() != m || alignments.size() != m || bytes.size() != m)
    throw std::invalid_argument("sources, targets, alignments and bytes must have one entry an edge");
  std::vector<Edge> edges(m);
  for (size_t i = 0; i < m; ++i) {
    if (sources[i] < 0 || targets[i] >= static_cast<int>(n)) throw std::invalid_argument("edge end out of range");
    edges[i] = {sources[i], targets[i], alignments[i], bytes[i]};
  }
  return Clustering(std::move(kinds), std::move(rows), std::move(cols), std::move(orders), std::move(costs),
                    std::move(inputs), std::move(held), std::move(edges), max_inputs, recompute)
      .run();
}

}  // namespace

NB_MODULE(_sim, m) {
  m.doc() = "Native graph algorithms of topo-opt.";
  m.def("cluster", &cluster, nb::arg("kinds"), nb::arg("rows"), nb::arg("cols"), nb::arg("orders"), nb::arg("costs"), nb::arg("inputs"),
        nb::arg("held"), nb::arg("sources"), nb::arg("targets"), nb::arg("alignments"), nb::arg("bytes"), nb::arg("max_inputs"), nb::arg("recompute"),
        nb::call_guard<nb::gil_scoped_release>());
}
