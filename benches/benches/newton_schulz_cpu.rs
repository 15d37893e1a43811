//! Newton-Schulz on a CPU: ours beside the same iteration in candle's plain operations, for the same
//! matrices in f32. The bar: ours takes no longer.

use candle_core::{Device, Result, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use polarshard_muon::{Coefficients, NewtonSchulz};

/// (matrices, rows, columns).
const SHAPES: [(usize, usize, usize); 5] = [
    (1, 64, 64),
    (4, 128, 512),
    (1, 256, 256),
    (1, 256, 1024),
    (1, 512, 512),
];

/// Each matrix of its own, as it is written in most optimizers.
fn plain(matrices: &[Tensor]) -> Result<Vec<Tensor>> {
    let steps = Coefficients::default().steps(5);
    let one = |x: &Tensor| {
        let norm = x.sqr()?.sum_all()?.sqrt()?;
        let mut x = x.broadcast_div(&norm)?;
        for &[a, b, c] in &steps {
            let gram = x.matmul(&x.t()?)?;
            let z = ((&gram * b)? + (gram.matmul(&gram)? * c)?)?;
            x = ((&x * a)? + z.matmul(&x)?)?;
        }
        Ok(x)
    };
    matrices.iter().map(one).collect()
}

fn newton_schulz(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("newton_schulz_cpu");
    group.sample_size(20);
    let ns = NewtonSchulz::default();
    for (count, rows, cols) in SHAPES {
        let matrices: Vec<_> = (0..count)
            .map(|_| Tensor::randn(0f32, 1f32, (rows, cols), &Device::Cpu))
            .collect::<Result<_>>()
            .expect("a CPU has random numbers");
        let shape = format!("{count} x {rows} x {cols}");
        group.throughput(Throughput::Elements((count * rows * cols) as u64));
        group.bench_with_input(BenchmarkId::new("ours", &shape), &matrices, |b, xs| {
            b.iter(|| ns.orthogonalize_all(xs).expect("finite matrices"));
        });
        group.bench_with_input(BenchmarkId::new("plain", &shape), &matrices, |b, xs| {
            b.iter(|| plain(xs).expect("matrices of one shape"));
        });
    }
    group.finish();
}

criterion_group!(benches, newton_schulz);
criterion_main!(benches);
