//! Checkpoints: of any world and settings, for any other; whole or not there.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use polarshard_muon::Rule;
use polarshard_partition::{Placement, Policy, Rank, Route, Stage, UpdateGroup};
use polarshard_testkit::harness::Worker;
use polarshard_testkit::model::{Draw, Model, StepGradients};
use polarshard_zero::{Config, Error};

use crate::support::{config, count, same_bits, trained, world};

const SEED: u64 = 31;
const BEFORE: usize = 2;
const AFTER: usize = 2;

/// A world and what its ranks are set to.
#[derive(Debug, Clone, Copy)]
struct Run {
    world: usize,
    placement: Placement,
    route: Route,
    policy: Policy,
    stage: Stage,
}

const RUNS: [Run; 5] = [
    Run {
        world: 1,
        placement: Placement::Striped,
        route: Route::ReduceScatter,
        policy: Policy::AssignOwner,
        stage: Stage::Two,
    },
    Run {
        world: 2,
        placement: Placement::Flat,
        route: Route::BucketAllReduce,
        policy: Policy::CopyToOwners,
        stage: Stage::One,
    },
    Run {
        world: 3,
        placement: Placement::Whole,
        route: Route::ReduceToOwner,
        policy: Policy::ExchangeUpdate,
        stage: Stage::Two,
    },
    Run {
        world: 4,
        placement: Placement::Striped,
        route: Route::AllReduce,
        policy: Policy::CopyToOwners,
        stage: Stage::Two,
    },
    Run {
        world: 8,
        placement: Placement::Flat,
        route: Route::ReduceScatter,
        policy: Policy::AssignOwner,
        stage: Stage::One,
    },
];

impl Run {
    fn config(self, model: &Model) -> Config {
        Config {
            placement: self.placement,
            route: self.route,
            policy: self.policy,
            stage: self.stage,
            bucket_size: count(50),
            ..config(model)
        }
    }

    /// Steps on from a checkpoint, or from the start, and saves at the end where asked to.
    fn weights(
        self,
        model: &Model,
        from: Option<&Path>,
        steps: &[StepGradients],
        to: Option<&Path>,
    ) -> Result<Vec<Tensor>> {
        // Another start, so that nothing but the checkpoint can bring the right weights.
        let initial = model.initial(if from.is_some() { SEED + 1 } else { SEED })?;
        let mut weights = world(self.world, |comm| -> Result<_> {
            let mut worker = Worker::new(comm, &initial, &model.roles, self.config(model))?;
            if let Some(folder) = from {
                worker.optimizer.load(folder)?;
                worker.optimizer.verify_replicas()?;
            }
            for step in steps {
                worker.step(step)?;
            }
            if let Some(folder) = to {
                worker.optimizer.save(folder)?;
            }
            let weights = worker.weights()?;
            worker.optimizer.shutdown()?;
            Ok(weights)
        })?;
        Ok(weights.swap_remove(0))
    }
}

/// The same mean gradients for every world: each rank has the same integers, so that all sums and means are exact.
fn steps(model: &Model, world: usize, from: usize, to: usize) -> Result<Vec<StepGradients>> {
    (from..to)
        .map(|step| {
            let one = model
                .gradients(Draw::Integers, SEED, step, 1, 1)?
                .swap_remove(0)
                .swap_remove(0);
            Ok(vec![vec![one; world]])
        })
        .collect()
}

#[test]
fn a_run_goes_on_bit_for_bit_in_every_other_world() -> Result<()> {
    let model = Model::everything();
    let names = trained(&model, &model.initial(SEED)?);
    let straight = RUNS[0].weights(&model, None, &steps(&model, 1, 0, BEFORE + AFTER)?, None)?;
    for writer in RUNS {
        let folder = tempfile::tempdir()?;
        let gradients = steps(&model, writer.world, 0, BEFORE)?;
        writer.weights(&model, None, &gradients, Some(folder.path()))?;
        for reader in RUNS {
            let gradients = steps(&model, reader.world, BEFORE, BEFORE + AFTER)?;
            let found = reader.weights(&model, Some(folder.path()), &gradients, None)?;
            // Means over 3 ranks round.
            if writer.world.is_power_of_two() && reader.world.is_power_of_two() {
                same_bits(&names, &found, &straight)
                    .with_context(|| format!("{writer:?} to {reader:?}"))?;
            } else {
                let wide = crate::support::all_values64(&straight)?;
                crate::support::close(&names, &found, &wide, 1e-5)
                    .with_context(|| format!("{writer:?} to {reader:?}"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_later_checkpoint_replaces_the_earlier_one() -> Result<()> {
    // Two ranks that both write, and three of which one has most of every parameter and writes it all.
    for (model, run, writers) in [
        (Model::everything(), RUNS[1], 2),
        (Model::nearly_nothing(), RUNS[2], 1),
    ] {
        let folder = tempfile::tempdir()?;
        let save = |to| -> Result<_> {
            let gradients = steps(&model, run.world, 0, to)?;
            run.weights(&model, None, &gradients, Some(folder.path()))
        };
        save(1)?;
        let last = save(3)?;
        let found = run.weights(&model, Some(folder.path()), &[], None)?;
        same_bits(&trained(&model, &model.initial(SEED)?), &found, &last)?;
        let files = fs::read_dir(folder.path())?.collect::<Result<Vec<_>, _>>()?;
        // The index and one file a rank that writes: nothing is left of the first, and nothing half written.
        ensure!(files.len() == 1 + writers, "{files:?}");
    }
    Ok(())
}

#[test]
fn a_crash_before_the_index_leaves_the_earlier_checkpoint() -> Result<()> {
    let model = Model::everything();
    let folder = tempfile::tempdir()?;
    let run = RUNS[1];
    let first = run.weights(
        &model,
        None,
        &steps(&model, run.world, 0, 1)?,
        Some(folder.path()),
    )?;
    let index = fs::read(folder.path().join("index.json"))?;
    let files: Vec<_> = fs::read_dir(folder.path())?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    let kept = tempfile::tempdir()?;
    for file in files
        .iter()
        .filter(|file| file.extension().is_some_and(|kind| kind == "safetensors"))
    {
        fs::copy(file, kept.path().join(file.file_name().context("a name")?))?;
    }
    run.weights(
        &model,
        None,
        &steps(&model, run.world, 0, 2)?,
        Some(folder.path()),
    )?;
    // The state of the folder had the machine stopped just before the index was renamed.
    fs::write(folder.path().join("index.json"), index)?;
    for file in fs::read_dir(kept.path())? {
        let file = file?;
        fs::copy(file.path(), folder.path().join(file.file_name()))?;
    }
    let found = run.weights(&model, Some(folder.path()), &[], None)?;
    same_bits(&trained(&model, &model.initial(SEED)?), &found, &first)
}

/// What each rank says of a checkpoint that cannot be loaded; the weights must be as before on all of them.
fn refused(model: &Model, folder: &Path) -> Result<Vec<Error>> {
    let initial = model.initial(SEED)?;
    let names = trained(model, &initial);
    let run = RUNS[1];
    world(run.world, |comm| -> Result<_> {
        let mut worker = Worker::new(comm, &initial, &model.roles, run.config(model))?;
        let error = worker
            .optimizer
            .load(folder)
            .expect_err("the checkpoint is of no use");
        let before: Vec<_> = names.iter().map(|(_, tensor)| tensor.clone()).collect();
        same_bits(&names, &worker.weights()?, &before)?;
        // The run goes on.
        for step in steps(model, run.world, 0, 1)? {
            worker.step(&step)?;
        }
        worker.optimizer.verify_replicas()?;
        worker.optimizer.shutdown()?;
        Ok(error)
    })
}

#[test]
fn what_cannot_be_loaded_is_named_and_changes_nothing() -> Result<()> {
    let model = Model::everything();
    let empty = tempfile::tempdir()?;
    for error in refused(&model, empty.path())? {
        assert!(error.to_string().contains("index.json"), "{error}");
    }

    let folder = tempfile::tempdir()?;
    RUNS[0].weights(&model, None, &[], Some(folder.path()))?;
    let mut other = Model::everything();
    let resized = other
        .params
        .iter_mut()
        .find(|param| param.name == "blocks.1.square.weight")
        .context("it is there")?;
    resized.shape = vec![8, 9];
    let errors = refused(&other, folder.path())?;
    assert!(
        errors.iter().any(|error| matches!(error, Error::CheckpointShape { name, .. } if name == "blocks.1.square.weight")),
        "{errors:?}"
    );
    assert!(
        errors.iter().all(|error| matches!(
            error,
            Error::CheckpointShape { .. } | Error::CheckpointFailed { .. }
        )),
        "{errors:?}"
    );

    let mut fewer = Model::everything();
    fewer.params.retain(|param| param.name != "scalar");
    for error in refused(&fewer, folder.path())? {
        assert!(
            matches!(&error, Error::NotInModel { name, .. } if name == "scalar"),
            "{error}"
        );
    }

    let mut rerouted = Model::everything();
    rerouted.rules = rerouted.rules.with("blocks.1.square.weight", Rule::AdamW);
    let errors = refused(&rerouted, folder.path())?;
    assert!(
        errors.iter().any(|error| matches!(error, Error::CheckpointGroup { name, model: UpdateGroup::AdamW } if name == "blocks.1.square.weight")),
        "{errors:?}"
    );

    // No checkpoint: which file, and why not.
    let index = folder.path().join("none").join("index.json");
    let errors = refused(&model, &folder.path().join("none"))?;
    let why = fs::read(&index).expect_err("no such file");
    let named = format!("the checkpoint file `{}`: {why}", index.display());
    assert!(
        errors.iter().any(|error| error.to_string() == named),
        "{errors:?}"
    );

    // A file that is truncated, or has what cannot be trained on.
    let file = fs::read_dir(folder.path())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|kind| kind == "safetensors"))
        .context("a file of tensors")?;
    let whole = fs::read(&file)?;
    let mut not_a_number = whole.clone();
    let last = not_a_number.len() - 4;
    not_a_number[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    let short = [0, 7, 20, whole.len() / 2].map(|len| &whole[..len]);
    for damaged in short.into_iter().chain([&*not_a_number]) {
        fs::write(&file, damaged)?;
        let errors = refused(&model, folder.path())?;
        assert!(
            errors
                .iter()
                .any(|error| matches!(error, Error::Checkpoint { path, .. } if *path == file)),
            "{errors:?}"
        );
    }
    Ok(())
}

#[test]
fn a_folder_that_cannot_be_written_is_named_on_every_rank_and_the_run_goes_on() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(SEED)?;
    let run = RUNS[3];
    let place = tempfile::tempdir()?;
    let file = place.path().join("a file");
    fs::write(&file, "")?;
    world(run.world, |comm| -> Result<()> {
        let mut worker = Worker::new(comm, &initial, &model.roles, run.config(&model))?;
        let error = worker
            .optimizer
            .save(&file)
            .expect_err("a file is no folder");
        assert!(matches!(&error, Error::Checkpoint { .. }), "{error}");
        for step in steps(&model, run.world, 0, 1)? {
            worker.step(&step)?;
        }
        worker.optimizer.verify_replicas()?;
        Ok(worker.optimizer.shutdown()?)
    })?;
    Ok(())
}

#[test]
fn saving_within_a_step_is_refused() -> Result<()> {
    let model = Model::nearly_nothing();
    let initial = model.initial(SEED)?;
    let folder = tempfile::tempdir()?;
    world(2, |comm| -> Result<()> {
        let mut worker = Worker::new(comm, &initial, &model.roles, config(&model))?;
        let step = steps(&model, 2, 0, 1)?.swap_remove(0);
        worker.hand_in(&step[0][worker.optimizer.rank().0])?;
        assert!(matches!(
            worker.optimizer.save(folder.path()),
            Err(Error::WithinStep { done: 1, .. })
        ));
        assert!(matches!(
            worker.optimizer.load(folder.path()),
            Err(Error::WithinStep { done: 1, .. })
        ));
        worker.optimizer.step()?;
        Ok(worker.optimizer.shutdown()?)
    })?;
    Ok(())
}

/// Files of a save that was interrupted, whole and not, where the index is not theirs or there is none.
#[test]
fn what_an_interrupted_save_left_is_neither_mixed_in_nor_kept() -> Result<()> {
    let model = Model::everything();
    let names = trained(&model, &model.initial(SEED)?);
    let run = RUNS[1];
    let gradients = steps(&model, run.world, 0, 1)?;
    let left = [
        "7-step-00000001-rank-00001.safetensors",
        "8-step-00000001-rank-00000.safetensors.partial",
    ];
    for had_one in [false, true] {
        let folder = tempfile::tempdir()?;
        if had_one {
            run.weights(&model, None, &[], Some(folder.path()))?;
        }
        for file in left.into_iter().chain(["model.safetensors"]) {
            fs::write(folder.path().join(file), "of an earlier run")?;
        }
        let saved = run.weights(&model, None, &gradients, Some(folder.path()))?;
        let mut found = fs::read_dir(folder.path())?
            .map(|file| Ok(file?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<Vec<_>>>()?;
        found.sort();
        let expected = [
            "9-step-00000001-rank-00000.safetensors",
            "9-step-00000001-rank-00001.safetensors",
            "index.json",
            "model.safetensors",
        ];
        ensure!(found == expected, "{found:?}");
        let loaded = run.weights(&model, Some(folder.path()), &[], None)?;
        same_bits(&names, &loaded, &saved)?;
    }

    // The first rank's folder has the file that the second one writes elsewhere, by name.
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    fs::write(
        folders[0]
            .path()
            .join("0-step-00000001-rank-00001.safetensors"),
        "",
    )?;
    let initial = model.initial(SEED)?;
    world(run.world, |comm| -> Result<()> {
        let mut worker = Worker::new(comm, &initial, &model.roles, run.config(&model))?;
        worker.step(&gradients[0])?;
        let rank = worker.optimizer.rank().0;
        let saved = worker.optimizer.save(folders[rank].path());
        ensure!(
            saved.is_err(),
            "rank {rank} has saved a part of another run"
        );
        Ok(worker.optimizer.shutdown()?)
    })?;
    Ok(())
}

#[test]
fn a_state_that_is_not_finite_replaces_no_checkpoint() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(SEED)?;
    let names = trained(&model, &initial);
    let folder = tempfile::tempdir()?;
    let run = RUNS[1];
    let mut config = run.config(&model);
    (config.adamw.lr, config.adamw.weight_decay) = (3e38, 0.0);
    let gradients = steps(&model, run.world, 0, 4)?;
    let good = world(run.world, |comm| -> Result<_> {
        let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
        worker.optimizer.save(folder.path())?;
        let good = worker.weights()?;
        for step in &gradients {
            worker.step(step)?;
        }
        let error = worker.optimizer.save(folder.path()).err();
        let error = error.context("infinite weights were saved")?;
        ensure!(
            matches!(&error, Error::CheckpointFailed { .. })
                || error.to_string().contains("are not finite"),
            "{error}"
        );
        worker.optimizer.shutdown()?;
        Ok(good)
    })?;
    let found = run.weights(&model, Some(folder.path()), &[], None)?;
    same_bits(&names, &found, &good[0])
}

/// Of another world at the same step, so that nothing but the files' names keeps the two apart.
#[test]
fn a_save_that_fails_leaves_the_earlier_checkpoint() -> Result<()> {
    let model = Model::everything();
    let names = trained(&model, &model.initial(SEED)?);
    let folder = tempfile::tempdir()?;
    let first = RUNS[0].weights(&model, None, &steps(&model, 1, 0, 1)?, Some(folder.path()))?;
    let listed = || -> Result<Vec<_>> {
        let mut files = fs::read_dir(folder.path())?
            .map(|file| Ok(file?.file_name()))
            .collect::<Result<Vec<_>>>()?;
        files.sort();
        Ok(files)
    };
    let before = listed()?;
    let run = RUNS[3];
    let other = model.initial(SEED + 1)?;
    // Where the last rank writes there is a folder, or where its file would be when it is whole.
    let last = run.world - 1;
    let file = format!("1-step-00000001-rank-{last:05}.safetensors");
    for in_the_way in [format!("{file}.partial"), file] {
        let in_the_way = folder.path().join(in_the_way);
        fs::create_dir(&in_the_way)?;
        fs::write(in_the_way.join("inside"), "")?;
        world(run.world, |comm| -> Result<()> {
            let mut worker = Worker::new(comm, &other, &model.roles, run.config(&model))?;
            for step in steps(&model, run.world, 0, 1)? {
                worker.step(&step)?;
            }
            let rank = worker.optimizer.rank().0;
            let error = worker.optimizer.save(folder.path()).err();
            let error = error.context("a folder was written to")?;
            let named = match &error {
                Error::Checkpoint { path, .. } => rank == last && *path == in_the_way,
                Error::CheckpointFailed { failed, .. } => rank != last && *failed == [Rank(last)],
                _ => false,
            };
            ensure!(named, "rank {rank}: {error}");
            Ok(worker.optimizer.shutdown()?)
        })?;
        fs::remove_dir_all(in_the_way)?;
        ensure!(listed()? == before, "{:?}", listed()?);
    }
    let found = RUNS[0].weights(&model, Some(folder.path()), &[], None)?;
    same_bits(&names, &found, &first)?;
    // At the same step again, nobody in the way.
    let second = run.weights(
        &model,
        None,
        &steps(&model, run.world, 0, 1)?,
        Some(folder.path()),
    )?;
    let found = RUNS[0].weights(&model, Some(folder.path()), &[], None)?;
    same_bits(&names, &found, &second)?;
    ensure!(listed()?.len() == 1 + run.world, "{:?}", listed()?);
    Ok(())
}

/// Each rank a folder of its own. Where both have a checkpoint of the same number and step, nothing but the time of
/// saving tells them apart; where they do not, the second rank's files are called as those that the first one's
/// folder would have next.
#[test]
fn ranks_that_are_given_different_folders_neither_save_nor_load() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(SEED)?;
    let names = trained(&model, &initial);
    let run = RUNS[1];
    let gradients = |seed| -> Result<Vec<StepGradients>> {
        let one = model.gradients(Draw::Integers, seed, 0, 1, 1)?;
        let one = &one[0][0];
        Ok(vec![vec![vec![one.clone(); run.world]]])
    };
    for saves in [[1, 1], [1, 2]] {
        let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
        let mut saved = Vec::new();
        for (rank, folder) in folders.iter().enumerate() {
            for _ in 1..saves[rank] {
                run.weights(&model, None, &gradients(SEED)?, Some(folder.path()))?;
            }
            let gradients = gradients(SEED + rank as u64)?;
            saved.push(run.weights(&model, None, &gradients, Some(folder.path()))?);
        }
        let listed = || -> Result<Vec<_>> {
            let mut files = Vec::new();
            for folder in &folders {
                for file in fs::read_dir(folder.path())? {
                    files.push(file?.path());
                }
            }
            files.sort();
            Ok(files)
        };
        let before = listed()?;
        world(run.world, |comm| -> Result<()> {
            let mut worker = Worker::new(comm, &initial, &model.roles, run.config(&model))?;
            let rank = worker.optimizer.rank().0;
            let folder = folders[rank].path();
            let error = worker.optimizer.load(folder).err();
            let error = error.context("two checkpoints were mixed")?;
            let told = matches!(&error, Error::OtherCheckpoint { rank: of, differing, folder: own }
                if *of == Rank(rank) && *differing == [Rank(1 - rank)] && own == folder);
            ensure!(told, "rank {rank}: {error}");
            let start: Vec<_> = names.iter().map(|(_, tensor)| tensor.clone()).collect();
            same_bits(&names, &worker.weights()?, &start)?;
            worker.step(&gradients(SEED)?[0])?;
            let error = worker.optimizer.save(folder).err();
            let error = error.context("an index names files that are not there")?;
            let other = format!("{}-step-00000001-rank-00001.safetensors", saves[1]);
            let told = match &error {
                Error::Checkpoint { path, .. } => rank == 0 && *path == folder.join(other),
                Error::CheckpointFailed { failed, .. } => rank == 1 && *failed == [Rank(0)],
                _ => false,
            };
            ensure!(told, "rank {rank}: {error}");
            worker.optimizer.verify_replicas()?;
            Ok(worker.optimizer.shutdown()?)
        })?;
        ensure!(listed()? == before, "{:?}", listed()?);
        for (folder, saved) in folders.iter().zip(&saved) {
            let found = run.weights(&model, Some(folder.path()), &[], None)?;
            same_bits(&names, &found, saved)?;
        }
    }
    Ok(())
}

#[test]
fn each_rank_may_load_a_copy_of_its_own() -> Result<()> {
    let model = Model::everything();
    let names = trained(&model, &model.initial(SEED)?);
    let run = RUNS[1];
    let [folder, copy] = [tempfile::tempdir()?, tempfile::tempdir()?];
    let gradients = steps(&model, run.world, 0, 1)?;
    let saved = run.weights(&model, None, &gradients, Some(folder.path()))?;
    for file in fs::read_dir(folder.path())? {
        let file = file?;
        fs::copy(file.path(), copy.path().join(file.file_name()))?;
    }
    let other = model.initial(SEED + 1)?;
    world(run.world, |comm| -> Result<()> {
        let mut worker = Worker::new(comm, &other, &model.roles, run.config(&model))?;
        let own = [&folder, &copy][worker.optimizer.rank().0];
        worker.optimizer.load(own.path())?;
        same_bits(&names, &worker.weights()?, &saved)?;
        Ok(worker.optimizer.shutdown()?)
    })?;
    Ok(())
}

/// What an index must not say, whoever wrote it.
#[test]
fn an_index_that_makes_no_sense_is_refused() -> Result<()> {
    let model = Model::everything();
    let place = tempfile::tempdir()?;
    let folder = place.path().join("checkpoint");
    RUNS[0].weights(&model, None, &[], Some(&folder))?;
    let path = folder.join("index.json");
    let index = fs::read_to_string(&path)?;
    let tensors = "0-step-00000000-rank-00000.safetensors";
    let beside = place.path().join("beside.safetensors");
    fs::copy(folder.join(tensors), &beside)?;
    let absolute = beside.display().to_string();
    let cases = [
        (tensors, "../beside.safetensors", "beside.safetensors"),
        (tensors, &absolute, "beside.safetensors"),
        (tensors, "index.json", "`index.json`"),
        (tensors, "..", "`..`"),
        (tensors, ".", "`.`"),
        (tensors, "", "``"),
        (
            "\"step\": 0",
            "\"step\": 18446744073709551615",
            "18446744073709551615",
        ),
        (
            "\"number\": 0",
            "\"number\": 18446744073709551615",
            "18446744073709551615",
        ),
        (
            "\"scalar\": 0",
            "\"scalar\": 3",
            "`scalar` was updated 3 times in 0 steps",
        ),
        (
            "\"scalar\": 0",
            "\"scaler\": 0",
            "`adamw_steps` has no `scalar`",
        ),
        ("\"format\": 1", "\"format\": 2", "format 2"),
    ];
    for (from, to, words) in cases {
        ensure!(index.contains(from), "{index} has no {from}");
        fs::write(&path, index.replace(from, to))?;
        for error in refused(&model, &folder)? {
            let text = format!("{:#}", anyhow::Error::new(error));
            ensure!(
                text.contains("index.json") && text.contains(words),
                "{to}: {text}"
            );
        }
        // A checkpoint that replaces it removes nothing outside the folder.
        RUNS[0].weights(&model, None, &[], Some(&folder))?;
        ensure!(
            beside.exists(),
            "{to}: a file outside the folder was removed"
        );
        ensure!(path.exists(), "{to}: the new index was removed");
    }
    Ok(())
}
