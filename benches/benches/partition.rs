//! Layouts and plans at scale: what a rank computes before its first step.
//!
//! The bar is 50 ms for a layout and its routes, of 100,000 parameters on 1,024 ranks, with growth
//! linear in parameters + blocks × ranks.

use std::hint::black_box;
use std::num::NonZeroUsize;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use polarshard_partition::{
    Error, Layout, Matrix, Param, Params, Placement, Plan, Policy, Route, Span, Wire, WorldSize,
};

/// Half matrices of four shapes, half vectors: 1.9 G elements for 100,000 parameters, which are 75
/// buckets of the default size.
fn params(count: usize) -> Result<Params, Error> {
    let param = |index: usize| {
        let (rows, cols) = [(256, 192), (192, 192), (192, 256), (64, 192)][index / 2 % 4];
        let (layer, part) = (index / 10, index % 10);
        let (n, m) = (rows.min(cols) as u64, rows.max(cols) as u64);
        let matrix = Matrix {
            span: Span::new(0, rows * cols),
            rows,
            cols,
            cost: 20 * n * n * m + 10 * n * n * n,
        };
        let is_matrix = part % 2 == 0;
        Param {
            name: format!("layers.{layer}.part.{part}"),
            shape: if is_matrix {
                [rows, cols][..].into()
            } else {
                [rows][..].into()
            },
            wire: Wire::BF16,
            matrices: if is_matrix { vec![matrix] } else { vec![] },
        }
    };
    Params::new((0..count).map(param).collect())
}

fn bucket_size() -> NonZeroUsize {
    NonZeroUsize::new(25_000_000).expect("not 0")
}

fn lay(params: &Params, world: usize, placement: Placement) -> Result<Layout, Error> {
    Layout::new(params, WorldSize::new(world)?, placement, bucket_size())
}

fn layouts(c: &mut Criterion) {
    let params = params(100_000).expect("names differ");
    let mut group = c.benchmark_group("layout of 100,000 parameters on 1,024 ranks");
    group
        .throughput(Throughput::Elements(100_000))
        .sample_size(20);
    for placement in Placement::ALL {
        group.bench_function(placement.to_string(), |b| {
            b.iter(|| lay(black_box(&params), 1024, placement));
        });
    }
    group.finish();
}

fn layouts_and_plans(c: &mut Criterion) {
    let mut group = c.benchmark_group("layout and default plan");
    group.sample_size(20);
    for (count, world) in [
        (100_000, 1024),
        (50_000, 1024),
        (25_000, 1024),
        (100_000, 512),
        (100_000, 64),
        (100_000, 8),
    ] {
        let params = params(count).expect("names differ");
        group.throughput(Throughput::Elements(count as u64));
        let id = BenchmarkId::new(format!("{count} parameters"), format!("{world} ranks"));
        group.bench_function(id, |b| {
            b.iter(|| {
                let layout = lay(black_box(&params), world, Placement::default())?;
                Ok::<_, Error>(Plan::new(
                    &params,
                    layout,
                    Route::default(),
                    Policy::default(),
                ))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, layouts, layouts_and_plans);
criterion_main!(benches);
