//! On ranks that are processes with GPUs: each run has the weights of the unsharded one on the CPU, within what the
//! iteration's precision allows, the same bits on all ranks, and exactly the calls that its plan predicts.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::DType;
use polarshard_comm::{Communicator, Nccl, Shared};
use polarshard_muon::{Method, Precision};
use polarshard_partition::{Plan, Rank};
use polarshard_testkit::compare::{change, relative};
use polarshard_testkit::devices::{moved, moved_gradients, on_devices};
use polarshard_testkit::harness::train;
use polarshard_testkit::model::Model;
use polarshard_testkit::processes::{Member, World};
use polarshard_testkit::reference::{Settings, Single};
use polarshard_testkit::replay::tolerance;

use super::{Case, SEED, cases};
use crate::support::{all_values64, trained};

#[test]
#[ignore = "needs a GPU"]
fn world_2() -> Result<()> {
    World::of("matrix::nccl::world_2", 2).run(|member| all_of(member, 2))
}

/// Every placement, route and policy, half of them in each stage.
#[test]
#[ignore = "needs a GPU"]
fn world_4() -> Result<()> {
    World::of("matrix::nccl::world_4", 4).run(|member| all_of(member, 4))
}

fn all_of(member: &Member, world: usize) -> Result<()> {
    let model = on_devices(Model::everything());
    let comm = member.connect()?;
    let of_world: Vec<_> = cases()
        .into_iter()
        .filter(|case| case.world == world)
        .collect();
    let alike =
        |a: &Case, b: &Case| (a.placement, a.route, a.policy) == (b.placement, b.route, b.policy);
    for (index, stages) in of_world.chunk_by(alike).enumerate() {
        let case = &stages[index % stages.len()];
        let precisions: &[Precision] = match index % 5 {
            0 => &[Precision::F32, Precision::F16],
            _ => &[Precision::F32],
        };
        for precision in precisions {
            let begun = Instant::now();
            let worst = check(member, &comm, case, *precision, &model)
                .with_context(|| format!("{case:?} in {precision}"))?;
            if comm.rank() == Rank(0) {
                let took = begun.elapsed().as_secs_f64();
                println!("{took:5.2} s  error {worst:.1e} in {precision}  {case:?}");
            }
        }
    }
    let comm = comm.into_inner().context("an optimizer has not ended")?;
    Ok(Box::new(comm).shutdown()?)
}

/// Runs a case on this rank. Returns the largest error of a parameter.
fn check(
    member: &Member,
    comm: &Shared<Nccl>,
    case: &Case,
    precision: Precision,
    model: &Model,
) -> Result<f64> {
    let mut config = case.config(model)?;
    config.muon.newton_schulz.iterate = precision;
    let initial = model.initial(SEED)?;
    let names = trained(model, &initial);
    let steps = case.gradients(model)?;
    let on_device = steps
        .iter()
        .map(|step| moved_gradients(step, DType::F32, &member.device))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let initial = moved(&initial, DType::F32, &member.device)?;
    // Proves at its end that the ranks have the same bits.
    let seen = train(
        comm.clone(),
        &initial,
        &model.roles,
        config.clone(),
        &on_device,
    )?;

    config.muon.newton_schulz.iterate = Precision::F32;
    let mut single = Single::new(&names, Settings::of(&config))?;
    let start = || all_values64(&single.weights()?);
    let (mut found, mut expected) = (start()?, start()?);
    let mut worst = 0f64;
    for (step, gradients) in steps.iter().enumerate() {
        single.step(gradients)?;
        let (found_before, expected_before) = (found, expected);
        found = all_values64(&seen.weights[step])?;
        expected = all_values64(&single.weights()?)?;
        for (index, (name, _)) in names.iter().enumerate() {
            let (error, allowed) = match precision {
                Precision::F32 => (relative(&found[index], &expected[index]), 1e-5),
                // Weights would hide what is wrong with their change.
                _ => (
                    relative(
                        &change(&found_before[index], &found[index]),
                        &change(&expected_before[index], &expected[index]),
                    ),
                    half(&seen.plan, name)?,
                ),
            };
            ensure!(
                error <= allowed,
                "`{name}` is off by {error:.2e} after step {step}, {allowed:.0e} is allowed"
            );
            worst = worst.max(error);
        }
    }
    let predicted = seen.plan.predict(comm.rank(), &seen.terms).calls;
    for (step, calls) in seen.calls.iter().enumerate() {
        ensure!(
            *calls == predicted,
            "step {step}: {calls:?} instead of {predicted:?}"
        );
    }
    Ok(worst)
}

/// What iterating in f16 may make of a step's change, as in the golden cases. Only DeepSpeed's rounding depends on the
/// method.
fn half(plan: &Plan, name: &str) -> Result<f64> {
    let id = plan.params().id(name).context("a parameter of the plan")?;
    let param = plan.params().get(id);
    tolerance(Method::Gram, DType::F16, param.group(), &param.shape).context("Gram is compared")
}
