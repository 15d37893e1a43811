//! Newton-Schulz on a CUDA device: our kernels and our cuBLAS path, beside the floor, what cuBLAS
//! reaches on one product, and what peers took on other NVIDIA H200s.
//!
//! `cargo bench -p polarshard-benches --features cuda --bench newton_schulz` prints milliseconds from
//! bf16 matrices to f16 results, five steps of the default coefficients; `f32` is to f32 results. Times
//! are medians on the device, of calls that follow each other without a wait, in groups of at least a
//! millisecond. `peers/newton_schulz.py` times the peers in the same way.
//!
//! From n = 2048 on, `share` is the rate of all FLOPs that our kernels execute in the time of `ours`, over
//! that of cuBLAS on n × n × n in f16, sustained; in `steady` ours is sustained as well: power sets the
//! pace of both.

use std::thread;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::{DType, Device, Result, Tensor};
use polarshard_muon::{Kernels, NewtonSchulz};

/// A shape, and milliseconds of peers on it in bf16, measured on an H200 with torch 2.11 and CUDA
/// 13.0: DeepSpeed's standard and Gram iteration, torch.optim.Muon, and Dao-AILab's Gram iteration in
/// a CUDA graph, with its kernels and on cuBLAS.
struct Row {
    batch: usize,
    n: usize,
    m: usize,
    peers: [Option<f64>; 5],
}

const PEERS: [&str; 5] = ["ds std", "ds gram", "torch", "dao", "dao cub"];

const fn row(batch: usize, n: usize, m: usize, peers: [f64; 5]) -> Row {
    let [a, b, c, d, e] = peers;
    Row {
        batch,
        n,
        m,
        peers: [Some(a), Some(b), Some(c), Some(d), Some(e)],
    }
}

const ROWS: [Row; 12] = [
    row(1, 1024, 1024, [0.512, 0.503, 0.292, 0.234, 0.173]),
    row(1, 2048, 2048, [0.613, 0.941, 0.464, 0.459, 0.473]),
    row(1, 4096, 4096, [3.51, 3.61, 3.25, 2.70, 3.40]),
    row(1, 8192, 8192, [26.2, 28.3, 25.4, 17.2, 26.5]),
    row(1, 1024, 4096, [0.965, 1.06, 0.498, 0.375, 0.231]),
    row(1, 2048, 8192, [1.46, 1.09, 1.33, 0.831, 0.928]),
    row(1, 4096, 11008, [7.37, 6.03, 7.06, 4.29, 5.75]),
    row(1, 4096, 14336, [9.02, 6.77, 9.02, 4.86, 6.38]),
    row(12, 768, 768, [0.653, 0.595, 3.99, 0.416, 0.462]),
    row(12, 768, 3072, [1.52, 1.03, 4.09, 0.845, 0.901]),
    row(24, 1024, 4096, [5.85, 3.86, 8.10, 2.79, 3.61]),
    Row {
        batch: 24,
        n: 2048,
        m: 8192,
        peers: [None, None, None, Some(16.6), Some(22.6)],
    },
];

/// Shapes that nobody tuned for: (batch, rows, columns).
const OTHERS: [(usize, usize, usize); 20] = [
    (1, 64, 64),
    (3, 100, 1000),
    (7, 333, 335),
    (1, 511, 2049),
    (2, 640, 640),
    (5, 777, 1555),
    (1, 1000, 3000),
    (9, 130, 4100),
    (4, 1023, 1025),
    (1, 1536, 1536),
    (2, 1800, 900),
    (16, 256, 256),
    (1, 2304, 768),
    (3, 2500, 2500),
    (1, 3001, 5003),
    (2, 4000, 1700),
    (1, 5120, 5120),
    (1, 6000, 2000),
    (6, 96, 5000),
    (40, 128, 512),
];

fn main() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    println!("milliseconds; `ceiling` is the floor's FLOPs at what cuBLAS reaches on n x n x n");
    print!(
        "{:>18} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>6}",
        "", "ours", "f32", "cublas", "floor", "ceiling", "share", "steady"
    );
    for peer in PEERS {
        print!(" {peer:>8}");
    }
    println!(" {:>6}  choice", "ratio");
    let mut logs = Vec::new();
    for Row { batch, n, m, peers } in &ROWS {
        let times = measure(*batch, *n, *m, &device)?;
        let floor = floor_flops(*batch, *n, *m) / 790e12 * 1e3;
        let rate = cublas_rate(*batch, *n, &device)?;
        let ceiling = floor_flops(*batch, *n, *m) / rate * 1e3;
        print!("{:>18}", format!("{batch} x {n} x {m}"));
        print!(
            " {:>8.4} {:>8.4} {:>8.3} {floor:>8.3} {ceiling:>8.3}",
            times.ours, times.ours_to_f32, times.cublas
        );
        if *n >= 2048 {
            let share = |milliseconds| times.flops / (milliseconds * 1e-3) / rate;
            print!(" {:>6.3} {:>6.3}", share(times.ours), share(times.steady));
        } else {
            print!(" {:>6} {:>6}", "", "");
        }
        for peer in peers {
            match peer {
                Some(peer) => print!(" {peer:>8.3}"),
                None => print!(" {:>8}", "-"),
            }
        }
        let fastest = peers.iter().flatten().fold(f64::INFINITY, |a, b| a.min(*b));
        println!(" {:>6.2}  {}", fastest / times.ours, times.choice);
        logs.push((fastest / times.ours).ln());
    }
    let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
    println!("geometric mean of (fastest peer / ours): {mean:.3}\n");

    println!(
        "{:>18} {:>8} {:>8} {:>6}  choice",
        "", "ours", "cublas", "ratio"
    );
    for (batch, rows, cols) in OTHERS {
        let times = measure(batch, rows, cols, &device)?;
        let name = format!("{batch} x {rows} x {cols}");
        let ratio = times.cublas / times.ours;
        let slower = if ratio < 1.0 { "  slower" } else { "" };
        let Times {
            ours,
            cublas,
            choice,
            ..
        } = times;
        println!("{name:>18} {ours:>8.3} {cublas:>8.3} {ratio:>6.2}  {choice}{slower}");
    }
    Ok(())
}

/// Milliseconds.
struct Times {
    ours: f64,
    ours_to_f32: f64,
    cublas: f64,
    /// `ours` after as long a warm-up as cuBLAS's rate has.
    steady: f64,
    /// FLOPs that `ours` executes.
    flops: f64,
    choice: String,
}

fn measure(batch: usize, rows: usize, cols: usize, device: &Device) -> Result<Times> {
    // A card that was hot keeps its clocks low for a while.
    thread::sleep(Duration::from_millis(500));
    let matrices = (0..batch)
        .map(|_| Tensor::randn(0f32, 1f32, (rows, cols), device)?.to_dtype(DType::BF16))
        .collect::<Result<Vec<_>>>()?;
    let ns = NewtonSchulz::default();
    let cublas = NewtonSchulz {
        kernels: Kernels::Cublas,
        ..ns.clone()
    };
    let as_iterated = |ns: &NewtonSchulz, warm: f64| {
        median(device, warm, || {
            ns.orthogonalize_all_as_iterated(&matrices)?;
            Ok(())
        })
    };
    let to_f32 = || {
        ns.orthogonalize_all(&matrices)?;
        Ok(())
    };
    let choice = ns.choice(device, batch, rows, cols)?;
    Ok(Times {
        ours: as_iterated(&ns, BRIEFLY)?,
        ours_to_f32: median(device, BRIEFLY, to_f32)?,
        cublas: as_iterated(&cublas, BRIEFLY)?,
        steady: as_iterated(&ns, LONG)?,
        flops: choice.map_or(0, |choice| choice.flops) as f64,
        choice: choice.map_or_else(String::new, |choice| choice.to_string()),
    })
}

/// FLOPs of the cheapest known form, with symmetric products at a half.
fn floor_flops(batch: usize, n: usize, m: usize) -> f64 {
    let (batch, n, m) = (batch as f64, n as f64, m as f64);
    let standard = 15.0 * n * n * m + 5.0 * n * n * n;
    let gram = 6.0 * n * n * m + 14.0 * n * n * n;
    batch * standard.min(gram)
}

/// FLOPs a second of a stack of n × n products by cuBLAS in f16.
fn cublas_rate(batch: usize, n: usize, device: &Device) -> Result<f64> {
    let x = Tensor::randn(0f32, 1f32, (batch, n, n), device)?.to_dtype(DType::F16)?;
    let milliseconds = median(device, LONG, || x.matmul(&x).map(|_| ()))?;
    Ok(2.0 * batch as f64 * (n as f64).powi(3) / (milliseconds * 1e-3))
}

/// Milliseconds of calls before those that are timed: a few, or until the clocks have settled.
const BRIEFLY: f64 = 2.0;
const LONG: f64 = 150.0;

/// The median time on the device of a call among others, in milliseconds.
fn median(device: &Device, warm: f64, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    const GROUPS: usize = 20;
    let stream = device.as_cuda_device()?.cuda_stream();
    let event = || {
        let timed = CUevent_flags::CU_EVENT_DEFAULT;
        stream
            .record_event(Some(timed))
            .map_err(candle_core::Error::wrap)
    };
    let mut group = |calls: usize| -> Result<()> { (0..calls).try_for_each(|_| call()) };
    let between = |a: &CudaEvent, b: &CudaEvent| -> Result<f64> {
        let time = a.elapsed_ms(b).map_err(candle_core::Error::wrap)?;
        Ok(f64::from(time))
    };
    group(2)?;
    let start = event()?;
    group(2)?;
    let end = event()?;
    device.synchronize()?;
    let rough = between(&start, &end)? / 2.0;
    let calls = (1.0 / rough).ceil().clamp(1.0, 50.0) as usize;
    group((warm / rough) as usize)?;
    let mut events = vec![event()?];
    for _ in 0..GROUPS {
        group(calls)?;
        events.push(event()?);
    }
    device.synchronize()?;
    let mut times = Vec::with_capacity(GROUPS);
    for pair in events.windows(2) {
        times.push(between(&pair[0], &pair[1])? / calls as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[GROUPS / 2])
}
