/* Stands in for pyxis, the SPANK plug-in behind `srun --container-image`.
 *
 * srun, sbatch and salloc take its options, and tasks see each in their environment:
 * --container-image=X as REALSYS_TEST_CONTAINER_IMAGE=X, an option without a value as 1. An image that
 * is a folder is really used: the task gets a mount namespace and a root of its own, over the image,
 * with /proc, /sys, /dev and the mounts that were asked for. Its other files are read-only unless
 * --container-writable; what is written to them is gone with the task. Any other image is only told.
 * Unlike pyxis, each task has its own container.
 *
 * plugstack.conf:  required PATH/fake_pyxis.so SCRATCH   (an empty folder; tasks mount over it)
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(fake_pyxis, 1);

enum { IMAGE, MOUNTS, WORKDIR, MOUNT_HOME, NO_MOUNT_HOME, WRITABLE };
enum { FAILED = -1 }; /* Slurm takes the positive ESPANK_ERROR of a task's hook for success */
static const struct {
    char *name;
    bool takes_value;
} OPTIONS[] = {
    [IMAGE] = {"container-image", true},
    [MOUNTS] = {"container-mounts", true},
    [WORKDIR] = {"container-workdir", true},
    [MOUNT_HOME] = {"container-mount-home", false},
    [NO_MOUNT_HOME] = {"no-container-mount-home", false},
    [WRITABLE] = {"container-writable", false},
    {"container-readonly", false},
    {"container-name", true},
    {"container-env", true},
    {"container-remap-root", false},
    {"no-container-remap-root", false},
};
#define NUM_OPTIONS ((int)(sizeof(OPTIONS) / sizeof(OPTIONS[0])))

static char *given[NUM_OPTIONS]; /* NULL: was not */
static bool contained;           /* this task has its root in the image */

static int failed(const char *what, const char *where)
{
    slurm_error("fake_pyxis: %s %s: %s", what, where, strerror(errno));
    return FAILED;
}

static int take_option(int number, const char *value, int remote)
{
    (void)remote;
    free(given[number]);
    given[number] = strdup(OPTIONS[number].takes_value ? value : "1");
    return ESPANK_SUCCESS;
}

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    (void)argc, (void)argv;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        struct spank_option option = {
            .name = OPTIONS[i].name,
            .arginfo = OPTIONS[i].takes_value ? "VALUE" : NULL,
            .usage = "[fake_pyxis] see the option of pyxis",
            .has_arg = OPTIONS[i].takes_value,
            .val = i,
            .cb = take_option,
        };
        if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
            return ESPANK_ERROR;
    }
    return ESPANK_SUCCESS;
}

static void tell_task(spank_t spank)
{
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char name[100];
        snprintf(name, sizeof name, "REALSYS_TEST_%s", OPTIONS[i].name);
        for (char *c = name; *c; c++)
            *c = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
        if (given[i])
            spank_setenv(spank, name, given[i], 1);
    }
}

/* Makes the folder (or, for anything else, the empty file) that `source` can be mounted on. */
static void make_target(const char *source, char *target)
{
    struct stat status;
    bool folder = stat(source, &status) || S_ISDIR(status.st_mode);
    for (char *slash = strchr(target + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(target, 0755);
        *slash = '/';
    }
    if (folder)
        mkdir(target, 0755);
    else
        close(open(target, O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
}

static int bind_mount(const char *root, const char *source, const char *inside, bool read_only)
{
    char target[PATH_MAX];
    snprintf(target, sizeof target, "%s%s", root, inside);
    make_target(source, target);
    if (mount(source, target, NULL, MS_BIND | MS_REC, NULL))
        return failed("mount", source);
    if (read_only && mount(NULL, target, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL))
        return failed("remount read-only", target);
    return ESPANK_SUCCESS;
}

/* SOURCE[:TARGET[:FLAG+FLAG]],... */
static int mount_all(const char *root, char *mounts)
{
    char *rest = NULL;
    for (char *one = strtok_r(mounts, ",", &rest); one; one = strtok_r(NULL, ",", &rest)) {
        char *source = strsep(&one, ":"), *target = strsep(&one, ":");
        bool read_only = false;
        for (char *flag; one && (flag = strsep(&one, "+"));)
            read_only |= !strcmp(flag, "ro");
        if (bind_mount(root, source, target ? target : source, read_only) != ESPANK_SUCCESS)
            return FAILED;
    }
    return ESPANK_SUCCESS;
}

/* A root over the image, in a mount namespace of this process. Its path is left in `root`. */
static int mount_root(const char *scratch, char root[PATH_MAX])
{
    static const char *const PARTS[] = {"upper", "work", "root"};
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return failed("new mount namespace for", given[IMAGE]);
    if (mount("tmpfs", scratch, "tmpfs", 0, "mode=0755"))
        return failed("mount tmpfs on", scratch);
    for (size_t i = 0; i < sizeof PARTS / sizeof PARTS[0]; i++) {
        snprintf(root, PATH_MAX, "%s/%s", scratch, PARTS[i]);
        if (mkdir(root, 0755))
            return failed("make", root);
    }
    char layers[3 * PATH_MAX];
    /* "." for the image, whose path may hold what ends an option */
    snprintf(layers, sizeof layers, "lowerdir=.,upperdir=%s/upper,workdir=%s/work", scratch, scratch);
    if (chdir(given[IMAGE]) || mount("overlay", root, "overlay", 0, layers))
        return failed("mount overlay of", given[IMAGE]);
    return ESPANK_SUCCESS;
}

static int fill_root(spank_t spank, const char *root)
{
    static const char *const SYSTEM[] = {"/proc", "/sys", "/dev"};
    char home[PATH_MAX];
    char temporary[PATH_MAX];
    snprintf(temporary, sizeof temporary, "%s/tmp", root);
    mkdir(temporary, 01777); /* slurmstepd goes there when the job's working directory is not inside */
    for (size_t i = 0; i < sizeof SYSTEM / sizeof SYSTEM[0]; i++)
        if (bind_mount(root, SYSTEM[i], SYSTEM[i], false) != ESPANK_SUCCESS)
            return FAILED;
    if (given[MOUNT_HOME] && !given[NO_MOUNT_HOME] &&
        spank_getenv(spank, "HOME", home, sizeof home) == ESPANK_SUCCESS &&
        bind_mount(root, home, home, false) != ESPANK_SUCCESS)
        return FAILED;
    if (given[MOUNTS] && mount_all(root, strdupa(given[MOUNTS])) != ESPANK_SUCCESS)
        return FAILED;
    if (!given[WRITABLE] && mount(NULL, root, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL))
        return failed("remount read-only", root);
    return ESPANK_SUCCESS;
}

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv)
{
    struct stat status;
    char root[PATH_MAX];
    tell_task(spank);
    if (!given[IMAGE] || given[IMAGE][0] != '/')
        return ESPANK_SUCCESS;
    if (stat(given[IMAGE], &status))
        return failed("no image", given[IMAGE]);
    if (!S_ISDIR(status.st_mode))
        return ESPANK_SUCCESS;
    if (argc < 1 || mount_root(argv[0], root) != ESPANK_SUCCESS || fill_root(spank, root) != ESPANK_SUCCESS)
        return FAILED;
    if (chroot(root))
        return failed("change root to", root);
    contained = true;
    return ESPANK_SUCCESS;
}

/* Comes after slurmstepd has gone to the job's working directory, as far as that exists inside. */
int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
    const char *workdir = given[WORKDIR] ? given[WORKDIR] : "/";
    (void)spank, (void)argc, (void)argv;
    return contained && chdir(workdir) ? failed("change directory to", workdir) : ESPANK_SUCCESS;
}
